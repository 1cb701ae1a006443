"""Fenced runs: of all attempts at a part of a Spark job, the tasks of one run."""

from __future__ import annotations

from .store import FenceStore, fence_store

__all__ = ("FenceStore", "fence_store")

"""Where the records of fenced runs are kept: Redis so far, one module for each kind of store."""

from __future__ import annotations

from .contract import FenceStore, fence_store

__all__ = ("FenceStore", "fence_store")

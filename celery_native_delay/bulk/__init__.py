"""Publish many delayed tasks fast: ``bulk(app)``."""

from .batch import Bulk, BulkResult, bulk

__all__ = ("Bulk", "BulkResult", "bulk")

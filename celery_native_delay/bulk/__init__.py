"""Bulk publishing of delayed tasks: ``bulk(app)``."""

from .batch import Bulk, BulkResult, bulk

__all__ = ("Bulk", "BulkResult", "bulk")

"""Batches of delayed tasks: ``bulk(app)`` and how its tasks travel."""

from .batch import Bulk, BulkResult, bulk

__all__ = ("Bulk", "BulkResult", "bulk")

"""Spark: prove what became of every task that was planned."""

from .reconcile import Reconciliation, read_events, reconcile

__all__ = ("Reconciliation", "read_events", "reconcile")

"""Millions of delayed tasks from a Spark DataFrame, and the proof that all of them ran.

Each is sent under an id that a retry does not change. Needs the extra
``celery_native_delay[spark]``, on the driver and in the executors' Python.
"""

from ..errors import FanOutFailed, InvalidFanOut, brought_by

with brought_by("spark", whose=__name__):
    from .fan_out import FanOut, FanOutResult
    from .ids import task_id_of
    from .plan import Plan
    from .receipts import Failure, Receipt
    from .reconcile import Reconciliation, read_events, reconcile

__all__ = (
    "Failure",
    "FanOut",
    "FanOutFailed",
    "FanOutResult",
    "InvalidFanOut",
    "Plan",
    "Receipt",
    "Reconciliation",
    "read_events",
    "reconcile",
    "task_id_of",
)

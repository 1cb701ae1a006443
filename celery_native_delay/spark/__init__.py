"""Send millions of delayed tasks from a Spark DataFrame, and check later that all tasks ran.

A task id is computed from the row, so that a second send of the row has the same task id. The
Python of driver and executors needs the extra ``celery_native_delay[spark]``.
"""

from ..errors import FanOutFailed, InvalidFanOut, brought_by

with brought_by("spark", module=__name__):
    from .fan_out import FanOut, FanOutResult
    from .ids import task_id_of
    from .plan import Plan
    from .reconcile import Reconciliation, read_events, reconcile
    from .sending import Failure, Receipt

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

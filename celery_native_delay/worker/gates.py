"""The gates: functions that decide, one after another, if an arriving task runs in the worker.

A gate takes an :class:`~celery_native_delay.worker.arrival.Arrival`. A gate with a memory is a
callable object. The module :mod:`~celery_native_delay.worker.strategies` carries out the decisions.
To add a gate, write the gate and add the gate to :func:`gates`.
"""

from __future__ import annotations

from ..due_time import due_us
from ..settings import DelaySettings
from ..transports.interface import Answer, Receipts
from .arrival import Announce, Arrival, Drop, Gate, Ruling, WaitUntil


def gates(settings: DelaySettings, moved: Moved, *more: Gate | None) -> tuple[Gate, ...]:
    """Return the gates (checks before a task runs) of a worker, in their order, *more* last."""
    # Early tasks go back first, so that the records are asked once per task, when it is due.
    ordered = (early if settings.adopt else None, moved, cancelled, expired, *more)
    return tuple(gate for gate in ordered if gate is not None)


class Moved:
    """The gate (check before a task runs) that drops messages of cancelled or moved tasks.

    *receipts* asks the records (state about waiting tasks). If *receipts* is None, all tasks pass.
    While the records are unreachable, ``native_delay_records_away`` decides if tasks run or wait. A
    cancelled task never waits, because the task would lose the mark of its cancellation.
    """

    def __init__(self, settings: DelaySettings) -> None:
        self.receipts: Receipts | None = None
        self._waits = settings.records_away != "run"

    def __call__(self, arrival: Arrival) -> Ruling | None:
        delayed = arrival.delayed
        if delayed is None or self.receipts is None or not arrival.has_headers:
            return None
        match self.receipts.may_run(arrival.fields, delayed):
            case Answer.DROP:
                return Drop("it was cancelled or rescheduled")
            case Answer.AWAY if self._waits and not delayed.cancelled:
                return arrival.until_records_answer(delayed.delivery_id)
        return None


def cancelled(arrival: Arrival) -> Ruling | None:
    """The gate (check) that lets Celery announce a task as revoked if it was cancelled."""
    return Announce() if arrival.is_cancelled else None


def expired(arrival: Arrival) -> Ruling | None:
    """The gate (check) that drops a message whose AMQP ``expiration`` ran out during its wait.

    RabbitMQ removes this property when it dead-letters, so our header keeps it. A task's own
    ``expires`` is left to Celery, which tells the result backend.
    """
    delayed = arrival.delayed
    if delayed is None or delayed.expires_ms is None or arrival.fields.get("expires"):
        return None
    late = arrival.now_us > delayed.expires_ms * 1000
    return Drop("it has expired", expired=True) if late else None


def early(arrival: Arrival) -> Ruling | None:
    """The gate (check) that puts a task which arrives before its ETA back into the broker.

    The task comes from a producer without this package, or has waited for as long as its broker can
    keep a message. In the second case the message keeps its delivery id.
    """
    if not arrival.is_early:
        return None
    delayed = arrival.delayed
    delivery_id = None if delayed is None else delayed.delivery_id
    return WaitUntil(due_us(arrival.fields["eta"]), delivery_id)

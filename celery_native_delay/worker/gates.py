"""The gates: functions that decide, one after another, what a worker does with an arriving task.

A gate takes an :class:`~celery_native_delay.worker.arrival.Arrival`; one that must remember
something is a callable object. :mod:`~celery_native_delay.worker.strategies` carries its ruling
out. To add a gate, write it and name it in :func:`gates`.
"""

from __future__ import annotations

from ..due_time import due_us
from ..settings import DelaySettings
from ..transports.interface import Answer, Receipts
from .arrival import Announce, Arrival, Drop, Gate, Ruling, WaitUntil


def gates(settings: DelaySettings, moved: Moved, *more: Gate | None) -> tuple[Gate, ...]:
    """The gates of a worker in the order in which they are asked; *more* come last."""
    # First the early tasks go back: the records are then asked once per task, when it is due.
    ordered = (early if settings.adopt else None, moved, cancelled, expired, *more)
    return tuple(gate for gate in ordered if gate is not None)


class Moved:
    """The gate that drops a message if the records say that another one has replaced it.

    Without *receipts* (no records) all tasks pass. While the records are unreachable,
    ``native_delay_records_away`` says if tasks run or wait. A cancelled task does not wait: it
    would lose the mark of its cancellation.
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
    """The gate that announces tasks as revoked that were cancelled while they waited."""
    return Announce() if arrival.is_cancelled else None


def expired(arrival: Arrival) -> Ruling | None:
    """The gate that drops messages whose AMQP ``expiration`` ran out while they waited.

    RabbitMQ removes that property when it dead-letters, so our header keeps it. A task's own
    ``expires`` is left to Celery, which tells the result backend.
    """
    delayed = arrival.delayed
    if delayed is None or delayed.expires_ms is None or arrival.fields.get("expires"):
        return None
    late = arrival.now_us > delayed.expires_ms * 1000
    return Drop("it has expired", expired=True) if late else None


def early(arrival: Arrival) -> Ruling | None:
    """The gate that puts tasks back into the broker that arrive before their ETA.

    They come from producers without this package, or have waited for as long as their broker can
    keep a message. The latter keep their delivery id.
    """
    if not arrival.is_early:
        return None
    delayed = arrival.delayed
    delivery_id = None if delayed is None else delayed.delivery_id
    return WaitUntil(due_us(arrival.fields["eta"]), delivery_id)

"""The gates that every task passes on its way into a worker, one matter each.

A gate is a function of the :class:`~celery_native_delay.worker.arrival.Arrival`, or an object that
can be called like one where something has to be remembered. It only rules;
:mod:`~celery_native_delay.worker.strategies` carries the ruling out. To add one, write it and name
it in :func:`gates`.
"""

from __future__ import annotations

from ..due_time import due_us
from ..settings import DelaySettings
from ..transports.interface import Answer, Receipts
from .arrival import Announce, Arrival, Drop, Gate, Ruling, WaitUntil


def gates(settings: DelaySettings, moved: Moved, *more: Gate | None) -> tuple[Gate, ...]:
    """The gates of a worker, in the order in which a task passes them; *more* come last."""
    # One that comes early goes back unasked: the records are asked once, when it is due.
    ordered = (early if settings.adopt else None, moved, cancelled, expired, *more)
    return tuple(gate for gate in ordered if gate is not None)


class Moved:
    """The gate for tasks that the records say were moved: another message has taken its place.

    Without *receipts*, as without records, everything passes. While the records are away, a task
    runs unasked or waits, as ``native_delay_records_away`` says; one that was cancelled does not
    wait, for it would lose the mark of that.
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
                return Drop("it was moved")
            case Answer.AWAY if self._waits and not delayed.cancelled:
                return arrival.until_records_answer(delayed.delivery_id)
        return None


def cancelled(arrival: Arrival) -> Ruling | None:
    """The gate for a task that was cancelled while it waited: announced, whatever its times say."""
    return Announce() if arrival.is_cancelled else None


def expired(arrival: Arrival) -> Ruling | None:
    """The gate for a message whose own ``expiration`` ran out while it waited.

    RabbitMQ forgets it when dead-lettering, so it is kept in the header. A task's ``expires`` is
    Celery's: it tells the result backend.
    """
    delayed = arrival.delayed
    if delayed is None or delayed.expires_ms is None or arrival.fields.get("expires"):
        return None
    late = arrival.now_us > delayed.expires_ms * 1000
    return Drop("it has expired", expired=True) if late else None


def early(arrival: Arrival) -> Ruling | None:
    """The gate for a task that comes before its ETA, and waits in the broker, not in memory.

    Such come from producers without this package, from another language or an older release. One
    that waits for longer than its broker can keep it comes early, too, and keeps its delivery id.
    """
    if not arrival.is_early:
        return None
    delayed = arrival.delayed
    delivery_id = None if delayed is None else delayed.delivery_id
    return WaitUntil(due_us(arrival.fields["eta"]), delivery_id)

"""Functions that check a received task, one after another, before the task runs.

Each function takes an :class:`~celery_native_delay.worker.arrival.Arrival` and returns a decision.
:mod:`~celery_native_delay.worker.strategies` carries out the decisions. To add a check, write a
function and add the function to :func:`gates`.
"""

from __future__ import annotations

from ..due_time import due_us
from ..settings import DelaySettings
from ..transports.interface import Answer, Receipts
from .arrival import Announce, Arrival, Drop, Gate, Ruling, WaitUntil


def gates(
    settings: DelaySettings, moved: Moved, scheduling: Gate | None, *more: Gate | None
) -> tuple[Gate, ...]:
    """Return the functions that check a received task, in calling order."""
    # Early tasks go back first, so that the records are asked once per task, when it is due.
    # A cancelled occurrence of a schedule entry publishes the next one, and then is announced.
    adopting = (early_of_ours if settings.drains else early) if settings.adopt else None
    ordered = (adopting, moved, scheduling, cancelled, expired, *more)
    return tuple(gate for gate in ordered if gate is not None)


class Moved:
    """A check before a task runs: drop the message if the task was cancelled or rescheduled.

    RabbitMQ, SQS and pgmq cannot change a waiting message, so the old message of a rescheduled task
    stays in the broker. This check looks for the message in ``native_delay_records`` (Redis or a
    database). If the records are unreachable, ``native_delay_records_away`` decides if the task
    runs.
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
    """A check before a task runs: let Celery announce a cancelled task as revoked."""
    return Announce() if arrival.is_cancelled else None


def expired(arrival: Arrival) -> Ruling | None:
    """A check before a task runs: drop a message whose ``expiration`` has passed."""
    if arrival.fields.get("expires") or not arrival.is_expired:
        return None  # Celery itself announces a task whose ``expires`` has passed
    return Drop("it has expired", expired=True)


def early(arrival: Arrival) -> Ruling | None:
    """A check before a task runs: return the task to the broker until its ETA.

    Two causes of early messages: a producer without this package, and a delay that is too long for
    the broker.
    """
    if not arrival.is_early:
        return None
    delayed = arrival.delayed
    delivery_id = None if delayed is None else delayed.delivery_id
    return WaitUntil(due_us(arrival.fields["eta"]), delivery_id)


def early_of_ours(arrival: Arrival) -> Ruling | None:
    """A check in a draining app: return only tasks that already waited in the broker."""
    return None if arrival.delayed is None else early(arrival)

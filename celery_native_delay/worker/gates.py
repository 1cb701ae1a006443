"""Functions that check a received task, one after another, before the task runs.

Each function takes an :class:`~celery_native_delay.worker.arrival.Arrival` and returns a decision.
:mod:`~celery_native_delay.worker.strategies` carries out the decisions. To add a check, write a
function and add the function to :func:`gates`.
"""

from __future__ import annotations

from ..due_time import due_us
from ..settings import DelaySettings
from .arrival import Announce, Arrival, Drop, Gate, Ruling, WaitUntil


def gates(
    settings: DelaySettings, revoked: Gate, scheduling: Gate | None, *more: Gate | None
) -> tuple[Gate, ...]:
    """Return the functions that check a received task, in calling order."""
    # Early tasks go back first, so that the store is asked once per task, when it is due.
    # A cancelled occurrence of a schedule entry publishes the next one, and then is announced.
    adopting = (early_of_ours if settings.drains else early) if settings.adopt else None
    ordered = (adopting, revoked, scheduling, cancelled, expired, *more)
    return tuple(gate for gate in ordered if gate is not None)


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

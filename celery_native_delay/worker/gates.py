"""The checks of a received task, and their order.

A *gate* takes an :class:`~celery_native_delay.worker.arrival.Arrival` and returns a decision, which
:mod:`~celery_native_delay.worker.strategies` carries out. To add a check, write a function or class
and add it to :func:`gates`.
"""

from __future__ import annotations

from ..due_time import due_us, due_us_or_none
from ..message import Delayed
from ..records.cancelled import was_cancelled
from ..records.interface import Records
from ..records.runs import read_run
from ..records.waiting import RUN
from ..settings import DelaySettings
from .arrival import Announce, Arrival, Drop, Gate, Ruling, WaitUntil
from .in_time import StoreGate, in_time

#: Microseconds for which a worker trusts what it has read of a run.
_RUN_READ_EVERY_US = 1_000_000

#: The largest number of runs that a worker remembers.
_MOST_RUNS = 1000


def gates(
    settings: DelaySettings,
    *,
    revoked: Gate | None = None,
    scheduling: Gate | None = None,
    holding: Gate | None = None,
    rated: Gate | None = None,
    once: Gate | None = None,
    unique: Gate | None = None,
) -> tuple[Gate, ...]:
    """Return the checks of a received task, in calling order; None leaves a check out."""
    ordered = (
        # First, so that a task asks the store once, when it is due.
        early_of_ours if settings.drains else early,
        revoked,
        # Before the next two: an occurrence that does not run publishes the next one, too.
        scheduling,
        cancelled,
        expired,
        # Before the gates that count a start, or lock a key.
        holding,
        rated,
        once,
        # Last: it locks the task's key, and then the task must not wait.
        unique,
    )
    return tuple(gate for gate in ordered if gate is not None)


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
    """A check in a draining app: return only tasks that already waited for their ETA."""
    delayed = arrival.delayed
    # A task of the user's transaction went through the store at once.
    if delayed is None or delayed.due_us < (due_us_or_none(arrival.fields.get("eta")) or 0):
        return None
    return early(arrival)


class Revoked(StoreGate):
    """A check before a task runs: announce a task that was cancelled where nothing can remove it.

    The task waited in the broker beside a store, which keeps its id. Or all tasks of its Spark run
    were cancelled, with one word in the state of the run. If the store is away, the task waits.
    """

    waits = (
        "tasks that waited in the broker, or are of a Spark run, wait until the store answers, as "
        "it knows the cancelled ones"
    )

    def __init__(self) -> None:
        self.state: Records | None = None
        """The state in the store; None if no task waits in the broker beside a store."""
        self.runs: Records | None = None
        """The state of runs: in the store, or in the Redis broker; None if there is neither."""
        #: By run: when it was read, and if it was cancelled.
        self._known: dict[str, tuple[int, bool]] = {}

    def concerns(self, delayed: Delayed | None) -> bool:
        """Return True if the store may know that a task was cancelled while it waited."""
        return self.state is not None and delayed is not None and not delayed.stored

    def __call__(self, arrival: Arrival) -> Ruling | None:
        delayed = arrival.delayed
        if not arrival.has_headers:
            return None
        state = self.state if self.concerns(delayed) else None
        run = arrival.fields.get(RUN) if self.runs is not None else None
        if state is None and not isinstance(run, str):
            return None
        try:
            is_revoked = isinstance(run, str) and self._is_cancelled(run, arrival.now_us)
            if state is not None and not is_revoked:
                is_revoked = in_time(lambda: was_cancelled(state, arrival.id))
        except Exception as exc:  # of any driver
            delivery_id = None if delayed is None else delayed.delivery_id
            return self.unanswered(arrival, exc, delivery_id=delivery_id)
        self.answered()
        return Announce() if is_revoked else None

    def _is_cancelled(self, run: str, now_us: int) -> bool:
        runs = self.runs
        read_us, is_cancelled = self._known.get(run, (0, False))
        if runs is not None and not 0 <= now_us - read_us < _RUN_READ_EVERY_US:
            known = in_time(lambda: read_run(runs, run))
            is_cancelled = known is not None and known.cancelled
            if len(self._known) >= _MOST_RUNS:
                self._known.clear()
            self._known[run] = now_us, is_cancelled
        return is_cancelled


def cancelled(arrival: Arrival) -> Ruling | None:
    """A check before a task runs: let Celery announce a cancelled task as revoked."""
    return Announce() if arrival.is_cancelled else None


def expired(arrival: Arrival) -> Ruling | None:
    """A check before a task runs: drop a message whose ``expiration`` has passed."""
    if arrival.fields.get("expires") or not arrival.is_expired:
        return None  # Celery itself announces a task whose ``expires`` has passed
    return Drop("it has expired", expired=True)

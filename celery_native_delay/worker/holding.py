"""Makes held tasks wait, and announces dropped tasks as revoked."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from time import monotonic, sleep
from typing import Any, TypeAlias

from celery.utils.log import get_logger

from ..due_time import due_us_or_none
from ..errors import described
from ..keyed.record import key_and_kind
from ..now import time_ns
from ..records.holds import RECORD, Hold, decoded
from ..records.interface import Records
from ..records.waiting import HELD, PLACE, Held, Waiting
from ..within import Within
from .arrival import AWAY_US, CLOCK_SKEW_US, Announce, Arrival, AskAgain, Ruling, WaitUntil
from .in_time import in_time

logger = get_logger(__name__)

#: Seconds between two looks at the holds. :data:`.app.holds.TAKEN_UP_SECONDS` is longer.
LOOK_SECONDS = 3.0

#: Holds that were read so many seconds ago are read again before a task: the consumer was busy, or
#: stopped. It is shorter than TAKEN_UP_SECONDS, after which a release lets the held tasks go.
_OLD_SECONDS = 4.0

#: Seconds between two attempts of a worker that boots.
_AGAIN_SECONDS = 0.2

#: Returns the result of a call that asks the store, or raises its error or that of a time limit.
_Within: TypeAlias = Callable[[Callable[[], list[str | None]]], list[str | None]]

#: The event that each worker sends when other holds begin to count, with a list ``holds``.
EVENT = "delay-holds"

_beside_consumer = Within(2.0, name="native-delay-holds")


class Holding:
    """A check before a task runs: let a held task wait, announce a dropped one as revoked.

    While the store is away, the holds that were read last count.
    """

    def __init__(self, keys_of: Callable[[Arrival], Collection[str | None]]) -> None:
        """*keys_of* returns the keys of a task's rate limits."""
        self._keys_of = keys_of
        self._state: Records | None = None
        self._consumer: Any = None
        self._holds: tuple[Hold, ...] = ()
        self._sent: list[dict[str, str]] = []
        self._read_at = 0.0
        self._is_away = False
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="native-delay-holds")
        self._look: Future[None] | None = None

    def begin(self, state: Records, consumer: Any, *, patience_seconds: float) -> None:
        """Read the holds now and then every 3 s. Call this again after each reconnect.

        A worker that boots waits for its first answer up to *patience_seconds*: else it would start
        held tasks. It does not wait longer, as tasks that nobody holds must run.
        """
        self._state, self._consumer = state, consumer
        self._read(in_time if self._read_at else _patiently(patience_seconds))
        if not self._read_at:
            logger.critical(
                "native delay: this worker knows no holds, as the store has not answered for %g s: "
                "until it answers, the worker starts held tasks, too",
                patience_seconds,
            )
        self._send_event()
        consumer.timer.call_repeatedly(LOOK_SECONDS, self._look_beside)

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    def concerns(self, task: str) -> bool:
        """Return True if a hold or drop is on for tasks of this name."""
        if monotonic() - self._read_at > _OLD_SECONDS and self._state and not self._is_away:
            self._read(in_time)
        return bool(self._holds) and self._first(task) is not None

    def __call__(self, arrival: Arrival) -> Ruling | None:
        if not arrival.has_headers or arrival.discarded is not None:
            return None  # a release cannot move a task of protocol 1
        headers = arrival.message.headers
        before = Held.of(headers.pop(HELD, None))
        if not self.concerns(arrival.name):
            return None
        hold = self._first(arrival.name, arrival)
        if hold is None:
            return None
        if hold.mode == "drop":
            return Announce()
        headers.pop(PLACE, None)  # the line goes on without it
        delivery_id = None if arrival.delayed is None else arrival.delayed.delivery_id
        if self._is_away:
            return arrival.until_store_answers(delivery_id)
        now_us = arrival.now_us if before is None else before.due_us
        held = Held(hold.name, hold.by, due_us_or_none(arrival.fields.get("eta")) or now_us)
        here = AskAgain(AWAY_US / 1e6, beside_prefetch=True)
        return WaitUntil(hold.due_us(held.due_us), delivery_id, here, {HELD: held.header})

    def _first(self, task: str, arrival: Arrival | None = None) -> Hold | None:
        """Return the first hold of a task name or, if given, of a task."""
        # A task that comes back at the end of a hold may be early by the difference of the clocks.
        now_us = time_ns() // 1000 + CLOCK_SKEW_US
        for hold in self._holds:
            if hold.concerns(task, now_us) and (
                arrival is None
                or (hold.key is None and not hold.search)
                or hold.matches(_as_waiting(arrival), self._keys(arrival))
            ):
                return hold
        return None

    def _keys(self, arrival: Arrival) -> Collection[str | None]:
        return {*self._keys_of(arrival), key_and_kind(arrival.message.headers)[0] or None}

    # --- reading -----------------------------------------------------------------------------

    def _look_beside(self) -> None:
        self._send_event()
        if self._look is None or self._look.done():
            self._look = self._thread.submit(self._read, _beside_consumer)

    def _read(self, within: _Within) -> None:
        state = self._state
        assert state is not None
        asked_at = monotonic()
        try:
            found = decoded(within(lambda: state.load([RECORD]))[0])
            # What somebody holds must not be lost by a drop of others, such as of `shop.*`.
            holds = tuple(sorted(found, key=lambda hold: hold.mode == "drop"))
        except Exception as exc:  # of any driver
            if not self._is_away:
                logger.warning(
                    "native delay: holds are not read until the store answers; %d known one(s) "
                    "stay on: %s",
                    len(self._holds),
                    described(exc),
                )
            self._is_away = True
        else:
            before, after = _told(self._holds), _told(holds)
            if before != after:
                logger.warning("native delay: held or dropped from now on: %s", after)
            self._holds = holds
            self._read_at = asked_at
            self._is_away = False

    def _send_event(self) -> None:
        """Send the list of holds and drops as an event, if it changed since the last event."""
        dispatcher = self._consumer.event_dispatcher
        # A release also notes in its hold how far it came, which is no news.
        told = [{"name": each.name, "mode": each.mode, "by": each.by} for each in self._holds]
        if told == self._sent or dispatcher is None or not dispatcher.enabled:
            return
        # send() would drop our group if `enable_events` named only Celery's groups.
        dispatcher.publish(EVENT, {"holds": told}, dispatcher.producer)
        self._sent = told


def _told(holds: Sequence[Hold]) -> str:
    return ", ".join(f"{each.name} ({each.mode}, {each.by})" for each in holds) or "nothing"


def _patiently(seconds: float) -> _Within:
    """Repeat a failing call for a number of seconds: a worker may start before its store."""
    end, within = monotonic() + seconds, Within(seconds, name="native-delay-holds")

    def repeated(call: Callable[[], list[str | None]]) -> list[str | None]:
        while True:
            try:
                return within(call)
            except Exception:  # of any driver
                if monotonic() + _AGAIN_SECONDS > end:
                    raise
                sleep(_AGAIN_SECONDS)

    return repeated


def _as_waiting(arrival: Arrival) -> Waiting:
    message = arrival.message
    info = message.delivery_info or {}
    key, kind = key_and_kind(message.headers)
    return Waiting.of(
        message.headers,
        message.properties,
        queue=arrival.queue,
        exchange=str(info.get("exchange") or ""),
        routing_key=str(info.get("routing_key") or ""),
        due_us=arrival.now_us,
        delivery_id="",
        key=key,
        kind=kind,
    )

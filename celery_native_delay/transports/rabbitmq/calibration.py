"""Half a minute with level queues of its own, to see how fast a broker's are.

What else the broker does can only make it slower, so the best of several rounds counts. Nothing
that users declared is touched. The queues are gone afterwards, also when it is interrupted;
if even that cannot be, they expire, and their exchanges with them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from itertools import pairwise
from secrets import token_hex
from statistics import fmean
from time import monotonic, sleep
from typing import Any

import amqp

from ...settings import DelaySettings
from ..timings import Timings
from .channels import OwnChannel, Publication, WindowChannel
from .declaring import apply
from .own_connection import LOST, connection_like
from .topology import Binding, Declaration, Exchange, Hop, Queue, Topology

#: TTLs are far longer than it takes: each message brings its own expiration.
_LEVELS, _RESOLUTION_SECONDS = 15, 60.0

#: What is left of a run that was killed goes after so long.
_EXPIRES_MS = 300_000

_LONE, _WAVES, _ROUNDS = 10, 12, 4
_IN_ONE_QUEUE = 1500
_IN_EACH_QUEUE = 64
_ATTEMPTS = 4

#: A light load; a gap of so long between two messages of it is a pause.
_LIGHT_SECONDS, _LIGHT_PER_SECOND, _LIGHT_MS = 8.0, 400, 200
_PAUSE_SECONDS = 0.03

#: Unconfirmed messages at a time; between two looks at a queue; before a wave that was published.
_WINDOW = 500
_LOOK_SECONDS = 0.003
_AHEAD_SECONDS = 0.2
_FIRST_GUESS_SECONDS = 0.0004
_PATIENCE_SECONDS = 30.0

#: Of the messages of a burst those that show its pace: not the first, nor the last.
_FROM, _UNTIL = 0.1, 0.9

#: As much as Celery sends for a task with a small argument.
_BODY = b'[[1234567890, "' + b"." * 200 + b'"], {}, {"callbacks": null, "errbacks": null}]'
_HEADERS = {
    "lang": "py",
    "task": "celery_native_delay.capacity",
    "id": "00000000-0000-0000-0000-000000000000",
    "shadow": None,
    "eta": "2026-11-22T12:00:00.000000+00:00",
    "expires": None,
    "group": None,
    "retries": 0,
    "timelimit": [None, None],
    "root_id": "00000000-0000-0000-0000-000000000000",
    "parent_id": None,
    "argsrepr": "(1234567890,)",
    "kwargsrepr": "{}",
    "origin": "celery_native_delay",
    "ignore_result": True,
}


def calibrate(client: Any, settings: DelaySettings, say: Callable[[str], object]) -> Timings:
    """Measure the broker of a kombu connection; *say* is told what goes on."""
    namespace = f"{settings.namespace}.capacity-{token_hex(4)}"
    own = DelaySettings(
        namespace=namespace,
        queue_type=settings.queue_type,
        levels=_LEVELS,
        resolution=_RESOLUTION_SECONDS,
        fused_bits=_LEVELS,
    )
    with _levels(client, Topology(own)) as levels:
        say("a few messages alone")
        idle_ms = levels.idle_ms()
        say("one message in each queue")
        lone_turn_ms = levels.lone_turn_ms(idle_ms)
        say("a light load")
        pause_ms, pauses = levels.pauses()
        say("one queue full of messages")
        one = max(levels.one_queue_per_second() for _ in range(_ROUNDS))
        say("all queues full of messages")
        publish_s, many = zip(*(levels.many_queues() for _ in range(_ROUNDS)), strict=True)
    return Timings(
        one_queue_per_second=one,
        many_queues_per_second=max(many),
        lone_turn_ms=lone_turn_ms,
        publish_ms=2 * 1000 * min(publish_s),  # to be handed out costs as much again
        idle_ms=idle_ms,
        pause_ms=pause_ms,
        pauses_per_minute=pauses,
    )


@contextmanager
def _levels(client: Any, topology: Topology) -> Iterator[_Levels]:
    """Level queues with a destination behind them; all of it deleted at the end."""
    levels = _Levels(topology)
    try:
        with closing(connection_like(client)) as connection:
            levels.declare(connection.connection)
            yield levels
    finally:
        # What was interrupted may have left half an answer on the connection.
        with suppress(*LOST), closing(connection_like(client)) as connection:
            levels.delete(connection.connection)


class _Levels:
    """The level queues of one run, all of which lead to one destination."""

    def __init__(self, topology: Topology) -> None:
        self._topology = topology
        self._hops: Sequence[Hop] = topology.level_queues
        self._arrived = f"{topology.space}.arrived"
        self._to_all = f"{topology.space}.all"
        # No more waits ahead: whichever queue a message expires in, it is due.
        self._key = topology.routing_key(0, topology.address("", self._arrived))

    def declare(self, connection: Any) -> None:
        """Declare everything; exchanges go when the last queue they are bound to has expired."""
        self._connection = connection
        self._window = WindowChannel(connection)
        self._channel = OwnChannel(connection)
        apply(self._channel, self._plan(), auto_delete_exchanges=True)

    def delete(self, connection: Any) -> None:
        """Delete everything that :meth:`declare` may have declared."""
        channel = OwnChannel(connection)
        for kind, delete in ((Queue, channel.queue_delete), (Exchange, channel.exchange_delete)):
            for declaration in self._plan():
                if isinstance(declaration, kind):
                    delete(declaration.name, nowait=True)
        channel.basic_qos(0, 0, False)

    def _plan(self) -> Iterator[Declaration]:
        topology = self._topology
        expires = {"x-expires": _EXPIRES_MS}
        for declaration in topology.plan():
            match declaration:
                case Queue(name, arguments):
                    yield Queue(name, arguments | expires)
                # Nothing is ever bound to this one, so that it would not go by itself.
                case Exchange(topology.ready_exchange):
                    continue
                case _:
                    yield declaration
        yield Queue(self._arrived, {"x-queue-type": topology.settings.queue_type, **expires})
        pattern = topology.delivery_pattern(topology.address("", self._arrived))
        yield Binding(topology.delivery_exchange, self._arrived, pattern)
        yield Exchange(self._to_all, "fanout")
        for hop in self._hops:
            yield Binding(self._to_all, hop.queue, "")

    # --- what is measured ----------------------------------------------------------------

    def idle_ms(self) -> float:
        """The lateness of a message that is alone, after one hop."""
        with self._consuming() as arrived:
            return 1000 * _good([self._wave(arrived, [hop]) for hop in self._hops[:_LONE]])

    def lone_turn_ms(self, idle_ms: float) -> float:
        """Milliseconds that each further queue adds where one message expires in all at once."""
        with self._consuming() as arrived:
            seconds = _good([self._wave(arrived, self._hops) for _ in range(_WAVES)])
        return max(0.0, seconds * 1000 - idle_ms) / (len(self._hops) - 1)

    def pauses(self) -> tuple[float, float]:
        """Length of the pauses under a light load in ms, and their number in a minute."""
        with self._consuming() as arrived:
            began = monotonic()
            sent = 0
            while (now := monotonic()) < began + _LIGHT_SECONDS:
                if now >= began + sent / _LIGHT_PER_SECOND:
                    self._send(self._hops[sent % len(self._hops)].entry, _LIGHT_MS)
                    sent += 1
                self._drain(0.001)
            self._window.read_down_to(0, deadline=now + _PATIENCE_SECONDS)
            self._wait_for(lambda: self._drained(arrived, sent), sent)
        gaps = (after - before for before, after in pairwise(arrived))
        pauses = [gap for gap in gaps if gap > _PAUSE_SECONDS]
        pause_ms = 1000 * fmean(pauses) if pauses else 0.0
        return pause_ms, len(pauses) * 60 / _LIGHT_SECONDS

    def one_queue_per_second(self) -> float:
        """The pace of one queue that is full of expired messages."""
        return self._burst(self._hops[-1].entry, _IN_ONE_QUEUE, queues=1)[1]

    def many_queues(self) -> tuple[float, float]:
        """Seconds to take in a message where many come, and the pace of all queues, full."""
        return self._burst(self._to_all, _IN_EACH_QUEUE, queues=len(self._hops))

    # --- private -------------------------------------------------------------------------

    def _wave(self, arrived: list[float], hops: Sequence[Hop]) -> float:
        """Seconds from the moment at which a message in each queue expires until the last came."""
        arrived.clear()
        due, _ = self._publish([hop.entry for hop in hops], _AHEAD_SECONDS)
        self._wait_for(lambda: self._drained(arrived, len(hops)), len(hops))
        return max(arrived[-1] - due, 0.0)

    def _burst(self, exchange: str, count: int, *, queues: int) -> tuple[float, float]:
        """Messages to *queues* at once that all expire together: seconds to take one in, pace."""
        ahead_seconds = 0.5 + _FIRST_GUESS_SECONDS * count * queues
        for _ in range(_ATTEMPTS):
            due, seconds = self._publish([exchange] * count, ahead_seconds)
            sleep(max(0.0, due - monotonic()))
            pace = self._pace(count * queues)
            if seconds < ahead_seconds:
                return seconds / count / queues, pace
            ahead_seconds = 2 * seconds
        raise TimeoutError(
            f"{count} messages were not taken in within {ahead_seconds / 2:.1f} s, so the pace of "
            f"its level queues cannot be measured"
        )

    def _publish(self, exchanges: Sequence[str], ahead_seconds: float) -> tuple[float, float]:
        """Publish to each of *exchanges*, all due then: when, by the monotonic clock.

        Returns that and the seconds until all were confirmed.
        """
        began = monotonic()
        due = began + ahead_seconds
        deadline = due + _PATIENCE_SECONDS
        window = self._window
        for exchange in exchanges:
            self._send(exchange, max(1, round((due - monotonic()) * 1000)))
            if window.unconfirmed_count >= _WINDOW:
                window.read_down_to(_WINDOW - 1, deadline=deadline)
        window.read_down_to(0, deadline=deadline)
        return due, monotonic() - began

    def _send(self, exchange: str, expires_ms: int) -> None:
        message = amqp.Message(
            _BODY,
            content_type="application/json",
            content_encoding="utf-8",
            delivery_mode=2,
            expiration=str(expires_ms),
            application_headers=_HEADERS,
        )
        self._window.send(Publication(message, exchange, self._key))

    def _pace(self, total: int) -> float:
        """Messages a second that come to the destination; it is empty afterwards."""
        seen: list[tuple[float, int]] = []

        def all_came() -> bool:
            asked = monotonic()
            count = self._channel.queue_declare(self._arrived, passive=True).message_count
            seen.append(((asked + monotonic()) / 2, count))
            sleep(_LOOK_SECONDS)
            return bool(count >= total)

        self._wait_for(all_came, total)
        self._channel.queue_purge(self._arrived)
        begin, end = (_when(seen, total * part) for part in (_FROM, _UNTIL))
        return total * (_UNTIL - _FROM) / max(end - begin, _LOOK_SECONDS)

    @contextmanager
    def _consuming(self) -> Iterator[list[float]]:
        """The times at which messages come meanwhile."""
        arrived: list[float] = []
        channel = self._channel
        tag = channel.basic_consume(
            self._arrived, no_ack=True, callback=lambda _: arrived.append(monotonic())
        )
        yield arrived
        channel.basic_cancel(tag)

    def _drained(self, arrived: list[float], count: int) -> bool:
        if len(arrived) < count:
            self._drain(0.5)
        return len(arrived) >= count

    def _drain(self, timeout_seconds: float) -> None:
        with suppress(TimeoutError):
            self._connection.drain_events(timeout=timeout_seconds)

    def _wait_for(self, done: Callable[[], bool], count: int) -> None:
        deadline = monotonic() + _PATIENCE_SECONDS
        while not done():
            if monotonic() > deadline:
                raise TimeoutError(
                    f"{count} message(s) were not through a level queue within "
                    f"{_PATIENCE_SECONDS:g} s, so its pace cannot be measured"
                )


def _good(seconds: Sequence[float]) -> float:
    """Seconds when nothing else goes on: better than three of four, and not by chance."""
    return sorted(seconds)[len(seconds) // 4]


def _when(seen: Sequence[tuple[float, int]], count: float) -> float:
    """The time at which *count* messages had come, between two looks."""
    before = (seen[0][0], 0)
    for at, found in seen:
        if found >= count:
            part = (count - before[1]) / max(found - before[1], 1)
            return before[0] + part * (at - before[0])
        before = (at, found)
    return seen[-1][0]

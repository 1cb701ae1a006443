"""Move due messages to their queues, in every worker or in ``delay promote``.

There is no leader. Each process sleeps until one of two events:

- The next due time has come. The process uses a local timer for this, because Redis checks the
  timeouts of blocked clients only every 100 ms.
- Redis answers the process's BZPOPMIN, because a message with an earlier due time was stored. Redis
  answers only one process. This process may die, so no process sleeps longer than
  :data:`LONGEST_SLEEP_SECONDS`.
"""

from __future__ import annotations

import logging
import select
import selectors
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from socket import socketpair
from threading import Event
from time import monotonic
from typing import Any

from kombu.exceptions import KombuError
from redis.exceptions import RedisError, TimeoutError

from ...backoff import Backoff
from ...errors import NativeDelayError
from ..interface import connect_once
from .store import BATCH, HandedOver, RedisBrokerStore, Rounds

logger = logging.getLogger(__name__)

#: Also the seconds between two heartbeats.
LONGEST_SLEEP_SECONDS = 10.0

#: A promoter that finds that another promoter was faster comes later next time. The delay in
#: seconds is doubled each time, up to the longest. So one of many promoters does the work.
FIRST_LAG_SECONDS = 0.001
LONGEST_LAG_SECONDS = 0.05

#: Seconds between attempts to reach the server: the first pause, and the longest.
RETRY_SECONDS = (0.1, 5.0)

#: How many requests are sent ahead while each answer reports a full batch. More are no faster.
_ROUNDS_AT_ONCE = 2

#: Timeouts of the promoter's connection. kombu's own connections have none.
CONNECTION_OPTIONS = {
    "socket_timeout": 10.0,
    "socket_connect_timeout": 10.0,
    "socket_keepalive": True,
}

#: Seconds for which the server holds a BZPOPMIN. Without an answer by then the connection is dead.
_BLOCK_SECONDS = 30
_GRACE_SECONDS = 15.0

#: FD_SETSIZE on Linux and macOS.
_SELECTABLE = 1024


class RedisPromoter:
    """A loop that moves due messages to their queues in Redis."""

    def __init__(self, connect: Callable[..., Any]) -> None:
        """*connect* is a function that opens a kombu connection."""
        self.promoted = 0
        self.parked = 0
        self._connect = connect
        self._stopping = Event()
        self._stop_reader, self._stop_writer = socketpair()
        self._stop_writer.setblocking(False)
        self._backoff = Backoff(*RETRY_SECONDS)
        self._store: RedisBrokerStore | None = None
        self._show_at = 0.0

    def run(self) -> None:
        """Move due messages until :meth:`stop` is called; reconnect after errors."""
        while not self._stopping.is_set():
            try:
                with self._connected() as (rounds, alarm):
                    self._promote(rounds, alarm)
            except Exception as exc:  # the loop must survive any error of the network
                if self._stopping.is_set():
                    break
                expected = isinstance(exc, NativeDelayError | RedisError | KombuError | OSError)
                logger.warning(
                    "native delay: promoting stopped, next attempt in %.1f s: %s: %s",
                    self._backoff.seconds,
                    type(exc).__name__,
                    exc,
                    exc_info=not expected,
                )
                self._stopping.wait(self._backoff.failed())
        self._stop_reader.close()
        self._stop_writer.close()

    def stop(self) -> None:
        self._stopping.set()
        with suppress(OSError):
            self._stop_writer.send(b"\0")

    @contextmanager
    def _connected(self) -> Iterator[tuple[Rounds, _Alarm]]:
        with self._connect(transport_options=CONNECTION_OPTIONS) as connection:
            connect_once(connection)
            channel = connection.default_channel
            delays, pool = channel.delays, channel.pool
            delays.prepare()
            rounds = Rounds(pool.make_connection(), delays.keys)
            alarm = _Alarm(pool.make_connection(), delays.keys.wake)
            try:
                self._store, self._show_at = delays.own, 0.0
                rounds.connect()
                alarm.arm(self._stop_reader)
                yield rounds, alarm
            finally:
                alarm.close()
                rounds.close()

    def _promote(self, rounds: Rounds, alarm: _Alarm) -> None:
        lag = Backoff(FIRST_LAG_SECONDS, LONGEST_LAG_SECONDS)
        lag_seconds = 0.0
        expected_us: int | None = None
        while not self._stopping.is_set():
            taken, handed = self._promote_due(rounds)
            if taken:
                lag.reset()
                lag_seconds = 0.0
            elif expected_us is not None and handed.next_us != expected_us:
                # Another promoter took the message, or this promoter came too early.
                lag_seconds = lag.failed()
            expected_us = None
            sleep_seconds = LONGEST_SLEEP_SECONDS
            if handed.wait_us is not None:
                due_at = rounds.last_asked_at + handed.wait_us / 1e6 + lag_seconds
                until_due_seconds = max(due_at - monotonic(), 0)
                if until_due_seconds < sleep_seconds:
                    sleep_seconds, expected_us = until_due_seconds, handed.next_us
            if alarm.wait(sleep_seconds):
                # No other promoter knows of the new message.
                lag.reset()
                lag_seconds = 0.0
                expected_us = None

    def _promote_due(self, rounds: Rounds) -> tuple[int, HandedOver]:
        """Move all due messages; return their number, and the result of the last script call."""
        taken = 0
        self._show()
        rounds.ask()
        while True:
            handed = rounds.answer()
            self._show()
            self._count(handed)
            taken += handed.taken
            if handed.taken == BATCH and not self._stopping.is_set():
                while rounds.asked_count < _ROUNDS_AT_ONCE:
                    rounds.ask()
            elif not rounds.asked_count:
                return taken, handed

    def _show(self) -> None:
        """Write this process's heartbeat if the last one is at least ten seconds old."""
        if self._store is not None and monotonic() >= self._show_at:
            self._show_at = monotonic() + LONGEST_SLEEP_SECONDS
            with suppress(RedisError):  # Redis may be full
                self._store.show_promoting()

    def _count(self, handed: HandedOver) -> None:
        if self._backoff.reset():
            logger.info("native delay: promoting again")
        self.promoted += handed.delivered
        self.parked += handed.parked
        if handed.parked:
            logger.error(
                "native delay: parked %d message(s) that their queue has refused: %s; see "
                "`celery -A PROJ delay parked list`",
                handed.parked,
                handed.refusal,
            )


class _Alarm:
    """A connection that waits in BZPOPMIN for a message with an earlier due time."""

    def __init__(self, connection: Any, key: str) -> None:
        self._connection = connection
        self._key = key
        self._asked_at = 0.0
        self._watched: list[Any] = []
        self._selector = selectors.DefaultSelector()

    def arm(self, stop_reader: Any) -> None:
        """Connect to Redis, and send the first BZPOPMIN."""
        self._connection.connect()
        self._watched = [self._connection._sock, stop_reader]
        for readable in self._watched:
            self._selector.register(readable, selectors.EVENT_READ)
        self._ask()

    def wait(self, seconds: float) -> bool:
        """Sleep up to *seconds*; return True if a message with an earlier due time arrived."""
        # With TLS the socket may have input that is no answer.
        if self._connection._sock in self._readable(seconds) and self._connection.can_read(
            timeout=0
        ):
            reply = self._connection.read_response()
            self._ask()
            return reply is not None
        if monotonic() - self._asked_at > _BLOCK_SECONDS + _GRACE_SECONDS:
            raise TimeoutError("no answer to BZPOPMIN")
        return False

    def _readable(self, seconds: float) -> list[Any]:
        # select() is exact, but takes low descriptors only. epoll rounds up to a millisecond.
        if max(each.fileno() for each in self._watched) < _SELECTABLE:
            return select.select(self._watched, [], [], seconds)[0]
        return [key.fileobj for key, _ in self._selector.select(seconds)]

    def close(self) -> None:
        self._selector.close()
        self._connection.disconnect()

    def _ask(self) -> None:
        # A health check could open another socket, which is not watched.
        self._connection.send_command("BZPOPMIN", self._key, _BLOCK_SECONDS, check_health=False)
        self._asked_at = monotonic()

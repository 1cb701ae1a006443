"""A connection to the ledger that keeps no task waiting: each use is bounded in time.

What publishing notes down is sent and not waited for; its answers are read with what follows. A
ledger that refuses, or owes an answer for :data:`PATIENCE_SECONDS`, is left alone for a while, one
warning tells so, and tasks wait and run as ever.
"""

from __future__ import annotations

import atexit
import logging
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from hashlib import sha1
from threading import Lock
from time import monotonic
from typing import Any

from ....backoff import Backoff
from ....errors import LedgerUnavailable, NoLedger, UnsupportedBroker
from ....rates.lines import Lines
from ....urls import redis_py_url, without_password
from ...aliases import flushes
from ...per_process import PerProcess
from .scripts import FORGET, RECEIVED, RECORD, LedgerKeys

logger = logging.getLogger(__name__)

#: Seconds that the ledger may take to connect, and for an answer.
PATIENCE_SECONDS = 0.3

#: The same where people ask, who wait longer than publishers.
ANSWER_SECONDS = 5.0

#: Seconds for which a ledger that failed is left alone: the first time, and at most.
LEFT_ALONE_SECONDS = (1.0, 30.0)

#: Answers are read at every so many messages, or after so many seconds.
_READ_EVERY = 64
_READ_AFTER_SECONDS = 0.05

#: What the script RECEIVED returns for a message that may run.
RUN = 0

RECEIVED_SHA = sha1(RECEIVED.encode(), usedforsecurity=False).hexdigest()


def redis_options(url: str, *, timeout_seconds: float) -> tuple[str, dict[str, Any]]:
    """URL and options for redis-py; UnsupportedBroker without it."""
    try:
        from redis.backoff import NoBackoff
        from redis.retry import Retry
    except ImportError as exc:
        raise UnsupportedBroker(
            "native_delay_ledger needs redis-py: pip install 'celery_native_delay[redis]'"
        ) from exc
    return redis_py_url(url), {
        "socket_timeout": timeout_seconds,
        "socket_connect_timeout": timeout_seconds,
        "retry": Retry(NoBackoff(), 0),
    }


def ledger_client(url: str) -> Any:
    """A client of redis-py's for all that people ask of a ledger."""
    to, options = redis_options(url, timeout_seconds=ANSWER_SECONDS)
    import redis

    return redis.Redis.from_url(to, **options)


@contextmanager
def explained(whose: str, meaning: str = "") -> Iterator[None]:
    """Turn errors of redis-py into LedgerUnavailable, which says *whose*, and what it means."""
    from redis import RedisError

    try:
        yield
    except (RedisError, OSError) as exc:
        raise LedgerUnavailable(
            f"{whose} does not answer: {str(exc).rstrip('.')}{meaning}"
        ) from exc


def lines_in(url: str | None, namespace: str, vhost: str) -> Lines:
    """The lines of rated tasks in the ledger at *url*; NoLedger if that is None."""
    if url is None:
        raise NoLedger(
            "native_delay_rates needs a Redis to count in beside RabbitMQ: set "
            'native_delay_ledger = "redis://…" in workers and producers'
        )
    from ....rates.in_redis import RedisLines

    space = LedgerKeys(namespace, vhost).space
    return RedisLines(connection_maker(url), space, without_password(url))


def connection_maker(url: str, *, timeout_seconds: float = PATIENCE_SECONDS) -> Callable[[], Any]:
    """A function that makes connections of redis-py's, which connect when told.

    Not their pool's own, which allows for so many in all: those that failed or were closed count.
    """
    to, options = redis_options(url, timeout_seconds=timeout_seconds)
    from redis import ConnectionPool

    pool = ConnectionPool.from_url(to, **options)
    return partial(pool.connection_class, **pool.connection_kwargs)


class LedgerConnection:
    """A connection to a ledger in Redis, used for a moment each time. For any thread of a process.

    Used to publish or to receive, not for both. *missed* counts what could not be noted or asked.
    """

    def __init__(self, url: str, namespace: str, vhost: str = "/") -> None:
        self._make_connection = connection_maker(url)
        from redis.exceptions import NoScriptError

        self._no_script = NoScriptError

        self.keys = LedgerKeys(namespace, vhost)
        self.missed = 0
        self._where = without_password(url)
        self._connection: Any = None
        self._lock = Lock()
        #: When each command that waits for its answer was sent.
        self._sent: deque[float] = deque()
        self._retry_at = 0.0
        self._backoff = Backoff(*LEFT_ALONE_SECONDS)
        self._told = False

    # --- publishing ----------------------------------------------------------------------

    def record(self, member: str, due_us: int, entry: bytes) -> None:
        """Note down a message that is about to wait; never fails, never waits."""
        self._send(RECORD, member, due_us, entry)

    def forget(self, member: str) -> None:
        """A message could not be sent after all."""
        self._send(FORGET, member)

    def _send(self, script: str, *arguments: Any) -> None:
        with self._lock:
            if not self._is_usable():
                self.missed += 1
                return
            try:
                self._connection.send_command("EVAL", script, 3, *self.keys.index, *arguments)
                now = monotonic()
                self._sent.append(now)
                if len(self._sent) >= _READ_EVERY or now - self._sent[0] > _READ_AFTER_SECONDS:
                    self._read_ready()
                    if self._sent and now - self._sent[0] > PATIENCE_SECONDS:
                        raise TimeoutError(f"no answer within {PATIENCE_SECONDS} s")
            except Exception as exc:  # whatever it is, publishing must go on
                self._lose(exc)

    def _read_ready(self, timeout_seconds: float = 0) -> None:
        while self._sent and self._connection.can_read(timeout_seconds):
            self._connection.read_response()
            self._sent.popleft()
            self._works()

    def flush(self) -> None:
        """Read what is outstanding: a socket that is closed with answers unread loses commands."""
        with self._lock, suppress(Exception):
            self._read_ready(PATIENCE_SECONDS)

    # --- receiving -----------------------------------------------------------------------

    def received(self, member: str) -> bool | None:
        """True if the message of *member* may run; None if the ledger does not answer.

        Its entry is gone then.
        """
        with self._lock:
            if not self._is_usable():
                self.missed += 1
                return None
            keys = (*self.keys.index, self.keys.marks + member.rpartition(":")[2])
            arguments = (4, *keys, member, self.keys.marks)
            try:
                try:
                    self._connection.send_command("EVALSHA", RECEIVED_SHA, *arguments)
                    answer = self._connection.read_response()
                except self._no_script:
                    self._connection.send_command("EVAL", RECEIVED, *arguments)
                    answer = self._connection.read_response()
            except Exception as exc:  # whatever it is, the worker must go on
                self._lose(exc)
                self.missed += 1
                return None
            self._works()
            return bool(answer == RUN)

    def connect(self) -> bool:
        """Connect now, so that no task has to wait for it; False if that fails."""
        with self._lock:
            return self._is_usable()

    # --- the connection ------------------------------------------------------------------

    def close(self) -> None:
        """Give the connection up; the next use makes another."""
        with self._lock:
            connection, self._connection = self._connection, None
            if connection is not None:
                connection.disconnect()

    def _is_usable(self) -> bool:
        if self._connection is not None:
            return True
        if monotonic() < self._retry_at:
            return False
        connection = self._make_connection()
        try:
            connection.connect()
        except Exception as exc:  # redis-py's, the resolver's, TLS'
            self._lose(exc)
            return False
        self._connection = connection
        return True

    def _works(self) -> None:
        if self._told:
            self._told = False
            logger.info("native delay: the ledger at %s is back", self._where)
        self._backoff.reset()

    def _lose(self, exc: Exception) -> None:
        connection, self._connection = self._connection, None
        self._sent.clear()
        if connection is not None:
            with suppress(Exception):
                connection.disconnect()
        self._retry_at = monotonic() + self._backoff.failed()
        if not self._told:
            self._told = True
            logger.warning(
                "native delay: the ledger at %s is away: tasks are delayed as ever, but cannot be "
                "listed, cancelled or moved until it is back: %s: %s",
                self._where,
                type(exc).__name__,
                exc,
            )


# ---- those of this process ---------------------------------------------------------------------

_connections: PerProcess[tuple[str, str, str], LedgerConnection] = PerProcess()


def ledger_connection(url: str, namespace: str, vhost: str = "/") -> LedgerConnection:
    """The process's connection for publishing."""
    key = (url, namespace, vhost)
    return _connections.get(key, lambda: LedgerConnection(*key))


def _flush_all() -> None:
    for found in _connections.values():
        found.flush()


flushes.append(_flush_all)
atexit.register(_flush_all)

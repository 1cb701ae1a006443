"""Connections to a Redis, each used for a moment.

Past redis-py's client, which takes as long as the server.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import lru_cache
from hashlib import sha1
from threading import Lock
from time import monotonic
from typing import Any

from redis.backoff import NoBackoff
from redis.exceptions import NoScriptError, RedisError
from redis.retry import Retry

from ..errors import RecordsUnavailable
from .away import Away
from .interface import LEFT_ALONE_SECONDS, PATIENCE_SECONDS

#: Answers to what was posted are read at every so many commands, or after so many seconds.
_READ_EVERY = 64
_READ_AFTER_SECONDS = 0.05

_ERRORS = RedisError, OSError

NOW = """
local time = redis.call('TIME')
local now = tonumber(time[1]) * 1000000 + tonumber(time[2])
"""

#: KEYS names. ARGV limit, what keys of records begin with. Returns the time, then of each its name
#: and its record.
_LATEST = (
    NOW
    + """
local found = {now}
for _, name in ipairs(redis.call('ZREVRANGEBYSCORE', KEYS[1], '+inf', now, 'LIMIT', 0, ARGV[1])) do
    found[#found + 1] = name
    found[#found + 1] = redis.call('GET', ARGV[2] .. name) or ''
end
return found
"""
)


class RedisLink:
    """A link to one Redis, for any thread; RecordsUnavailable while it is away or left alone.

    Its connections are as redis-py's *pool* makes them, but not the pool's own, which allows for so
    many in all: those that failed or were closed count.
    """

    def __init__(
        self,
        pool: Any,
        what: str,
        *,
        timeout_seconds: float,
        left_alone_seconds: tuple[float, float] = LEFT_ALONE_SECONDS,
        logs: bool = True,
    ) -> None:
        """*timeout_seconds* to connect, and for an answer; for the others see :class:`Away`."""
        self._pool = pool
        self._timeout_seconds = timeout_seconds
        self._away = Away(what, left_alone_seconds=left_alone_seconds, logs=logs)
        #: Connections that are not in use.
        self._idle: list[Any] = []
        self._posting: Any = None
        self._posting_lock = Lock()
        #: When each posted command that waits for its answer was sent.
        self._sent: deque[float] = deque()

    # --- asking --------------------------------------------------------------------------

    def run(self, script: str, keys: tuple[str, ...] | list[str], *arguments: Any) -> Any:
        """The answer of *script*, which is loaded if the server does not know it."""
        words = (len(keys), *keys, *arguments)
        with self._lent() as connection:
            try:
                return _answer(connection, "EVALSHA", digest_of(script), *words)
            except NoScriptError:
                return _answer(connection, "EVAL", script, *words)

    def ask(self, *command: Any) -> Any:
        """The answer to *command*."""
        with self._lent() as connection:
            return _answer(connection, *command)

    def connect(self) -> bool:
        """Connect now, so that no task has to wait for it; False if that fails."""
        with suppress(RecordsUnavailable), self._lent():
            return True
        return False

    @contextmanager
    def _lent(self) -> Iterator[Any]:
        connection = self._idle_one()
        if connection is None:
            connection = self._connected()
        try:
            yield connection
        except _ERRORS as exc:
            connection.disconnect()
            raise self._away.failed(exc) from exc
        self._away.works()
        self._idle.append(connection)

    def _idle_one(self) -> Any:
        """A connection that is not in use and was not closed by the server; None without one.

        Nothing can have come on it but the end.
        """
        while True:
            try:
                connection = self._idle.pop()
            except IndexError:
                return None
            with suppress(*_ERRORS):
                if not connection.can_read():
                    return connection
            connection.disconnect()

    def _connected(self) -> Any:
        self._away.check()
        try:
            connection = self._pool.connection_class(**self._pool.connection_kwargs)
            # redis-py's own retries would sleep for seconds, also where there is no patience.
            connection.retry = Retry(NoBackoff(), 0)
            for timeout in ("socket_timeout", "socket_connect_timeout"):
                setattr(connection, timeout, self._timeout_seconds)
            connection.connect()
        except Exception as exc:  # redis-py's, the resolver's, TLS'
            raise self._away.failed(exc) from exc
        return connection

    # --- posting -------------------------------------------------------------------------

    def post(self, script: str, keys: tuple[str, ...], *arguments: Any) -> bool:
        """Send *script* without waiting for its answer; False if that failed, or is not tried."""
        with self._posting_lock:
            try:
                if self._posting is None:
                    self._posting = self._connected()
                self._posting.send_command("EVAL", script, len(keys), *keys, *arguments)
                now = monotonic()
                self._sent.append(now)
                if len(self._sent) >= _READ_EVERY or now - self._sent[0] > _READ_AFTER_SECONDS:
                    self._read_ready()
                    if self._sent and now - self._sent[0] > PATIENCE_SECONDS:
                        raise TimeoutError(f"no answer within {PATIENCE_SECONDS} s")
            except Exception as exc:  # whatever it is, publishing must go on
                self._stop_posting()
                if not isinstance(exc, RecordsUnavailable):
                    self._away.failed(exc)
                return False
            return True

    def flush(self, timeout_seconds: float | None = None) -> None:
        """Read outstanding answers: a socket that is closed with answers unread loses commands."""
        with self._posting_lock, suppress(Exception):
            self._read_ready(min(timeout_seconds or PATIENCE_SECONDS, PATIENCE_SECONDS))

    def _read_ready(self, timeout_seconds: float = 0) -> None:
        while self._sent and self._posting.can_read(timeout_seconds):
            self._posting.read_response()
            self._sent.popleft()
            self._away.works()

    def _stop_posting(self) -> None:
        connection, self._posting = self._posting, None
        self._sent.clear()
        if connection is not None:
            with suppress(Exception):
                connection.disconnect()

    # --- the connections -----------------------------------------------------------------

    def close(self) -> None:
        """Give the connections up; the next use makes others."""
        with self._posting_lock:
            self._stop_posting()
        while self._idle:
            self._idle.pop().disconnect()


def latest(link: RedisLink, names: str, prefix: str, limit: int) -> tuple[int, list[Any]]:
    """The time in µs, and names and texts of the records that are kept longest.

    *names* is a sorted set of names by the end of their TTLs, *prefix* the beginning of their keys.
    """
    now_us, *found = link.run(_LATEST, [names], limit, prefix)
    texts = [text.decode() for text in found]
    return now_us, [pair for pair in zip(texts[::2], texts[1::2], strict=True) if pair[1]]


def _answer(connection: Any, *command: Any) -> Any:
    connection.send_command(*command)
    return connection.read_response()


@lru_cache
def digest_of(script: str) -> str:
    """The digest by which a server knows *script*."""
    return sha1(script.encode(), usedforsecurity=False).hexdigest()

"""Connects to Redis with a timeout for each call."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import lru_cache
from hashlib import sha1
from threading import Lock
from time import monotonic
from typing import Any

from billiard.exceptions import SoftTimeLimitExceeded
from redis.backoff import NoBackoff
from redis.exceptions import NoScriptError, RedisError
from redis.retry import Retry

from ..errors import RecordsUnavailable, described, errors_ignored
from .interface import LEFT_ALONE_SECONDS, PATIENCE_SECONDS
from .link_failures import LinkFailures

logger = logging.getLogger(__name__)

#: The answers to scripts of :meth:`RedisLink.post` are read after so many scripts or seconds.
_READ_EVERY = 64
_READ_AFTER_SECONDS = 0.05

_ERRORS = RedisError, OSError

NOW = """
local time = redis.call('TIME')
local now = tonumber(time[1]) * 1000000 + tonumber(time[2])
"""

#: KEYS the sorted set of names. ARGV limit, prefix of the records' keys. Returns the time in µs,
#: then the name and the text of each record.
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
    """A thread-safe Redis client. Raises RecordsUnavailable if Redis does not answer.

    The client opens its own connections, with the connection parameters of redis-py's *pool*.
    :class:`.LinkFailures` explains *what*, *left_alone_seconds* and *logs*.
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
        self._pool = pool
        self._timeout_seconds = timeout_seconds
        self._failures = LinkFailures(what, left_alone_seconds=left_alone_seconds, logs=logs)
        #: Open connections that no thread uses now.
        self._idle: list[Any] = []
        self._post_connection: Any = None
        self._post_lock = Lock()
        #: For each script of :meth:`post` whose answer was not read yet: the time of the sending.
        self._sent_at: deque[float] = deque()

    # --- asking --------------------------------------------------------------------------

    def run(self, script: str, keys: tuple[str, ...] | list[str], *arguments: Any) -> Any:
        """Run a Lua script on the Redis server, and return the script's answer."""
        words = (len(keys), *keys, *arguments)
        with self._connection_in_use() as connection:
            try:
                return _answer(connection, "EVALSHA", digest_of(script), *words)
            except NoScriptError:
                return _answer(connection, "EVAL", script, *words)

    def ask(self, *command: Any) -> Any:
        with self._connection_in_use() as connection:
            return _answer(connection, *command)

    def connect(self) -> bool:
        """Open a connection if none is idle; return False if the server does not answer."""
        with suppress(RecordsUnavailable), self._connection_in_use():
            return True
        return False

    @contextmanager
    def _connection_in_use(self) -> Iterator[Any]:
        connection = self._idle_connection()
        if connection is None:
            connection = self._new_connection()
        try:
            yield connection
        except _ERRORS as exc:
            connection.disconnect()
            raise self._failures.failed(exc) from exc
        self._failures.succeeded()
        self._idle.append(connection)

    def _idle_connection(self) -> Any:
        """Return an open connection that no thread uses, or None."""
        while True:
            try:
                connection = self._idle.pop()
            except IndexError:
                return None
            with suppress(*_ERRORS):
                if not connection.can_read():
                    return connection
            connection.disconnect()

    def _new_connection(self) -> Any:
        self._failures.check()
        try:
            connection = self._pool.connection_class(**self._pool.connection_kwargs)
            # redis-py's own retries would sleep for seconds.
            connection.retry = Retry(NoBackoff(), 0)
            for timeout in ("socket_timeout", "socket_connect_timeout"):
                setattr(connection, timeout, self._timeout_seconds)
            connection.connect()
        except SoftTimeLimitExceeded:
            raise
        except Exception as exc:  # errors of redis-py, of the resolver or of TLS
            raise self._failures.failed(exc) from exc
        return connection

    # --- posting -------------------------------------------------------------------------

    def post(self, script: str, keys: tuple[str, ...], *arguments: Any) -> bool:
        """Send a Lua script without waiting for the answer; False if it could not be sent."""
        with self._post_lock:
            try:
                if self._post_connection is None:
                    self._post_connection = self._new_connection()
                self._post_connection.send_command("EVAL", script, len(keys), *keys, *arguments)
                now = monotonic()
                self._sent_at.append(now)
                if (
                    len(self._sent_at) >= _READ_EVERY
                    or now - self._sent_at[0] > _READ_AFTER_SECONDS
                ):
                    self._read_ready()
                    if self._sent_at and now - self._sent_at[0] > PATIENCE_SECONDS:
                        raise TimeoutError(f"no answer within {PATIENCE_SECONDS} s")
            except UnicodeError as exc:  # nothing was sent, and the connection is sound
                logger.warning(
                    "native delay: a task runs as before, but cannot be listed, cancelled or "
                    "moved: %s",
                    described(exc),
                )
                return False
            except Exception as exc:  # an error here must not stop the publish
                self._close_post_connection()
                if isinstance(exc, SoftTimeLimitExceeded):
                    raise
                if not isinstance(exc, RecordsUnavailable):
                    self._failures.failed(exc)
                return False
            return True

    def flush(self, timeout_seconds: float | None = None) -> None:
        """Read the answers to all scripts sent by :meth:`post`, within a time limit."""
        with self._post_lock, errors_ignored():
            self._read_ready(min(timeout_seconds or PATIENCE_SECONDS, PATIENCE_SECONDS))

    def _read_ready(self, timeout_seconds: float = 0) -> None:
        while self._sent_at and self._post_connection.can_read(timeout_seconds):
            self._post_connection.read_response()
            self._sent_at.popleft()
            self._failures.succeeded()

    def _close_post_connection(self) -> None:
        connection, self._post_connection = self._post_connection, None
        self._sent_at.clear()
        if connection is not None:
            with errors_ignored():
                connection.disconnect()

    # --- the connections -----------------------------------------------------------------

    def close(self) -> None:
        """Close all connections to Redis. The next call opens a new connection."""
        with self._post_lock:
            self._close_post_connection()
        while self._idle:
            self._idle.pop().disconnect()


def latest(link: RedisLink, names: str, prefix: str, limit: int) -> tuple[int, list[Any]]:
    """Return the server's time, and up to *limit* stored states as pairs of name and text.

    The state with the latest expiry comes first.

    - *names*: the Redis key of a sorted set, which has the states' names, scored by expiry.
    - *prefix*: the beginning of a state's Redis key; the state's name follows.
    """
    now_us, *found = link.run(_LATEST, [names], limit, prefix)
    texts = [text.decode() for text in found]
    return now_us, [pair for pair in zip(texts[::2], texts[1::2], strict=True) if pair[1]]


def _answer(connection: Any, *command: Any) -> Any:
    connection.send_command(*command)
    return connection.read_response()


@lru_cache
def digest_of(script: str) -> str:
    return sha1(script.encode(), usedforsecurity=False).hexdigest()

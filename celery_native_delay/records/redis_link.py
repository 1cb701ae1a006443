"""Connects to Redis with a time limit for each call."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import lru_cache
from hashlib import sha1
from typing import Any, TypeVar

from redis.backoff import NoBackoff
from redis.exceptions import NoScriptError, ReadOnlyError, RedisError, ResponseError
from redis.exceptions import TimeoutError as RedisTimeoutError
from redis.retry import Retry

from ..errors import StoreUnavailable

T = TypeVar("T")

_ERRORS = RedisError, OSError

NOW = """
local time = redis.call('TIME')
local now = tonumber(time[1]) * 1000000 + tonumber(time[2])
"""


class RedisLink:
    """A thread-safe Redis client with connections of its own.

    A call is made again, once, on a new connection, if its connection was lost or leads to a server
    that has become a replica. Methods raise StoreUnavailable if Redis does not answer in time, or
    refuses the call.
    """

    def __init__(self, pool: Any, what: str, *, timeout_seconds: float) -> None:
        """Use the connection parameters of redis-py's *pool*; *what* names the server in errors."""
        self._pool = pool
        self._what = what
        self._timeout_seconds = timeout_seconds
        #: Open connections that no thread uses now.
        self._idle: list[Any] = []

    def run(self, script: str, keys: tuple[str, ...] | list[str], *arguments: Any) -> Any:
        """Run a Lua script on the Redis server, and return the script's answer."""
        words = (len(keys), *keys, *arguments)

        def ran(connection: Any) -> Any:
            try:
                return _answer(connection, "EVALSHA", digest_of(script), *words)
            except NoScriptError:
                return _answer(connection, "EVAL", script, *words)

        return self._asked(ran)

    def ask(self, *command: Any) -> Any:
        return self._asked(lambda connection: _answer(connection, *command))

    def _asked(self, question: Callable[[Any], T]) -> T:
        for is_last_try in (False, True):
            try:
                with self._connection_in_use() as connection:
                    return question(connection)
            except _ERRORS as exc:
                late = isinstance(exc, RedisTimeoutError | TimeoutError)
                refused = isinstance(exc, ResponseError) and not _is_of_a_replica(exc)
                if is_last_try or late or refused:
                    said = str(exc).strip().partition("\n")[0].rstrip(".")
                    raise StoreUnavailable(
                        f"{self._what} does not work: {type(exc).__name__}: {said}"
                    ) from exc
                self.close()  # the other idle connections are as old
        raise AssertionError("unreachable")

    @contextmanager
    def _connection_in_use(self) -> Iterator[Any]:
        connection = self._idle_connection() or self._new_connection()
        try:
            yield connection
        except ResponseError:
            self._idle.append(connection)  # Redis has answered
            raise
        except BaseException:
            connection.disconnect()  # an answer may still come
            raise
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
        connection = self._pool.connection_class(**self._pool.connection_kwargs)
        # redis-py's own retries would sleep for seconds.
        connection.retry = Retry(NoBackoff(), 0)
        for timeout in ("socket_timeout", "socket_connect_timeout"):
            setattr(connection, timeout, self._timeout_seconds)
        connection.connect()
        return connection

    def close(self) -> None:
        """Close all idle connections to Redis. The next call opens a new connection."""
        while self._idle:
            with suppress(IndexError, *_ERRORS):
                self._idle.pop().disconnect()


def _is_of_a_replica(exc: ResponseError) -> bool:
    # Before Redis 7 a script's error has no class of its own.
    return isinstance(exc, ReadOnlyError) or "READONLY" in str(exc)


def _answer(connection: Any, *command: Any) -> Any:
    connection.send_command(*command)
    return connection.read_response()


@lru_cache
def digest_of(script: str) -> str:
    return sha1(script.encode(), usedforsecurity=False).hexdigest()

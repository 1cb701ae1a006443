"""Connections to a Redis, each used for a moment.

Past redis-py's client, which takes as long as the server.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import lru_cache, partial
from hashlib import sha1
from threading import Lock
from time import monotonic
from typing import Any

from ..errors import RecordsUnavailable, UnsupportedBroker
from ..urls import redis_py_url
from .away import Away
from .interface import LEFT_ALONE_SECONDS, PATIENCE_SECONDS

#: Answers to what was posted are read at every so many commands, or after so many seconds.
_READ_EVERY = 64
_READ_AFTER_SECONDS = 0.05


def connection_maker(url: str, *, timeout_seconds: float) -> Callable[[], Any]:
    """A function that makes connections of redis-py's, which connect when told.

    Not their pool's own, which allows for so many in all: those that failed or were closed count.
    """
    to, options = redis_options(url, timeout_seconds=timeout_seconds)
    from redis import ConnectionPool

    pool = ConnectionPool.from_url(to, **options)
    return partial(pool.connection_class, **pool.connection_kwargs)


def redis_options(url: str, *, timeout_seconds: float) -> tuple[str, dict[str, Any]]:
    """URL and options for redis-py; UnsupportedBroker without it."""
    try:
        from redis.backoff import NoBackoff
        from redis.retry import Retry
    except ImportError as exc:
        raise UnsupportedBroker(
            "records in Redis need redis-py: pip install 'celery_native_delay[redis]'"
        ) from exc
    # redis-py's own retries would sleep for seconds, also where there is no patience.
    return redis_py_url(url), {
        "socket_timeout": timeout_seconds,
        "socket_connect_timeout": timeout_seconds,
        "retry": Retry(NoBackoff(), 0),
    }


class RedisLink:
    """A link to one Redis, for any thread; RecordsUnavailable while it is away or left alone."""

    def __init__(
        self,
        make_connection: Callable[[], Any],
        where: str,
        *,
        left_alone_seconds: tuple[float, float] = LEFT_ALONE_SECONDS,
    ) -> None:
        """*make_connection* gives one of redis-py's, which connects when told; *where* is shown."""
        from redis.exceptions import NoScriptError, RedisError

        self._no_script = NoScriptError
        self._errors = RedisError, OSError
        self._make_connection = make_connection
        self._away = Away(where, left_alone_seconds=left_alone_seconds)
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
                return _answer(connection, "EVALSHA", _sha(script), *words)
            except self._no_script:
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
        except self._errors as exc:
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
            with suppress(*self._errors):
                if not connection.can_read():
                    return connection
            connection.disconnect()

    def _connected(self) -> Any:
        self._away.check()
        try:
            connection = self._make_connection()
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


def _answer(connection: Any, *command: Any) -> Any:
    connection.send_command(*command)
    return connection.read_response()


@lru_cache
def _sha(script: str) -> str:
    return sha1(script.encode(), usedforsecurity=False).hexdigest()

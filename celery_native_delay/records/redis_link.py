"""Connects to Redis with a time limit for each call."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import lru_cache
from hashlib import sha1
from typing import Any, TypeVar
from urllib.parse import unquote, urlsplit

import redis
from kombu.utils.imports import symbol_by_name
from redis.backoff import NoBackoff
from redis.exceptions import NoScriptError, ReadOnlyError, RedisError, ResponseError
from redis.exceptions import TimeoutError as RedisTimeoutError
from redis.retry import Retry
from redis.sentinel import MasterNotFoundError, Sentinel

from ..errors import SettingsError, StoreUnavailable
from ..urls import redis_py_url, without_credential_provider
from .interface import ANSWER_SECONDS

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


def redis_client(url: str, *, timeout_seconds: float = ANSWER_SECONDS) -> Any:
    """Make a redis-py client without retries.

    *timeout_seconds* is for connecting, for an answer, and for asking all Sentinels. The URL with
    Sentinels is ``sentinel://user:password@host:26379,host2:26379/service/0``.
    """
    url, provider = without_credential_provider(url)
    options = {
        "credential_provider": None if provider is None else _credential_provider(provider),
        **_limits(timeout_seconds),
    }
    if not url.startswith("sentinel://"):
        client = redis.Redis.from_url(redis_py_url(url), **options)
        # The URL may have this option, and we read bytes.
        client.connection_pool.connection_kwargs["decode_responses"] = False
        return client
    place = urlsplit(url)
    login, _, hosts = place.netloc.rpartition("@")
    if login:
        user, _, password = login.partition(":")
        options |= {"username": unquote(user) or None, "password": unquote(password) or None}
    _, service, database = place.path.split("/")
    pairs = [
        (host.partition(":")[0], int(host.partition(":")[2] or 26379)) for host in hosts.split(",")
    ]
    sentinels = _Sentinels(pairs, sentinel_kwargs=_limits(timeout_seconds / len(pairs)))
    return sentinels.master_for(service, db=int(database), **options)


def _limits(seconds: float) -> dict[str, Any]:
    """Return redis-py's options for time limits; its own retries would sleep for seconds."""
    retry = Retry(NoBackoff(), 0)
    return {"socket_timeout": seconds, "socket_connect_timeout": seconds, "retry": retry}


class _Sentinels(Sentinel):  # type: ignore[misc]
    """redis-py's Sentinel with a readable error."""

    def discover_master(self, service_name: str) -> Any:
        try:
            return super().discover_master(service_name)
        except MasterNotFoundError:
            raise MasterNotFoundError(
                f"no Sentinel that answers knows a primary {service_name!r} that is up"
            ) from None


def _credential_provider(name: str) -> redis.CredentialProvider:
    """Make the object that gives a user and a password for each connection, as kombu does."""
    try:
        found = symbol_by_name(name)()
    except (ImportError, AttributeError, TypeError, ValueError) as exc:
        found = exc
    if not isinstance(found, redis.CredentialProvider):
        raise SettingsError(
            f"expected the dotted name of a subclass of redis.CredentialProvider that can be "
            f"called without arguments, got {name!r} ({found!r}): change credential_provider in "
            f"the URL"
        )
    return found

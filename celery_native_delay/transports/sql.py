"""Subclasses of kombu's transports for brokers that cannot delay: all tasks wait in a store.

Examples are the transports ``filesystem``, ``mongodb`` and ``sqlalchemy``. Each subclass is
created at the first use of its transport. kombu imports a transport by a path, such as
``celery_native_delay.transports.sql:filesystem``. Without the transport option ``native_delay``,
the subclass behaves exactly like kombu's transport.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from heapq import nsmallest
from pathlib import Path
from queue import Empty
from threading import Event
from time import monotonic, time
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

from amqp.exceptions import RecoverableConnectionError
from kombu.exceptions import ChannelError
from kombu.transport import virtual
from kombu.utils.imports import symbol_by_name
from kombu.utils.json import dumps

from ..errors import CannotDelay, UnsupportedBroker
from ..finding import WRONG, Finding
from ..records.publishing import underway
from ..settings import DelaySettings, is_store_url
from ..store.entry import StoreEntry
from ..store.interface import Store
from ..store.opened import store_of
from .aliases import OPTION, originals
from .interface import AdminPart, Backlog, Told, Wait, WorkerPart
from .moving import Source
from .virtual.channel import (
    DelayingChannel,
    DelayingTransport,
    VirtualDelays,
    VirtualMessage,
)
from .virtual.moving import StoreSource, VirtualMovingPart

#: Error numbers that mean that the queue's name is wrong, if the folder exists.
_BY_NAME = (errno.ENOENT, errno.ENOTDIR, errno.EINVAL, errno.ENAMETOOLONG)

#: An incomplete file of this age is left by a producer that has died.
_WRITING_SECONDS = 10.0

#: More than the next file, because other consumers may take that one in the meantime.
_LOOKED_AT = 10


class SqlDelays(VirtualDelays):
    """Knows the store in which all delayed tasks of this broker wait."""

    @cached_property
    def store(self) -> Store | None:
        self.check_settings()
        url = self._channel.connection.store_url(self.settings)
        if url is None or not is_store_url(url):
            raise UnsupportedBroker(
                "expected native_delay_store to be the URL of a database or of a Redis, such as "
                "sqlite:////var/lib/shop/delays.db: this broker cannot delay by itself"
            )
        return store_of(self.settings, url=url)


class StoreDelayingChannel(DelayingChannel):
    """A mixin for kombu's channels: all delayed tasks wait in a store."""

    delays_class = SqlDelays
    keeps_all_in_store = True

    def returns_to_store(self, headers: Mapping[str, Any] | None) -> bool:
        return True

    def moving_part(self, settings: DelaySettings) -> StoreMovingPart:
        return StoreMovingPart(self)

    def own_worker_part(self, settings: DelaySettings) -> WorkerPart:
        return NoWorkerPart(self, settings)

    def own_admin_part(self, settings: DelaySettings) -> NoAdminPart:
        return NoAdminPart()

    def _put_fanout(
        self, exchange: str, message: dict[str, Any], routing_key: str, **kwargs: Any
    ) -> Any:
        if not self.put_broadcast(exchange, message, routing_key):
            super()._put_fanout(exchange, message, routing_key, **kwargs)  # type: ignore[misc]


class StoreMovingPart(VirtualMovingPart):
    """Moves tasks out of the store of a broker that cannot delay."""

    def _source(self) -> Source:
        return StoreSource(self._channel.needed_store)

    def own_sources(self) -> list[Source]:
        return []


class NoWorkerPart(WorkerPart):
    """A worker's operations on a broker in which nothing waits."""

    def prepare(self, where: str) -> str:
        return "nothing"

    def put_one_back(self, wait: Wait) -> None:
        raise CannotDelay("this broker cannot delay by itself: it needs a store that answers")

    def dangers(self) -> list[Finding]:
        """Report a problem if the filesystem transport reads and writes different folders."""
        if not is_folder(self._channel):
            return []
        out, into = self._channel.data_folder_out, self._channel.data_folder_in
        if Path(out).absolute() == Path(into).absolute():
            return []
        problem = (
            f"due messages go to data_folder_out, {out}, and this worker consumes from "
            f"data_folder_in, {into}"
        )
        way_out = "name the same folder twice in broker_transport_options"
        return [Finding("folders", WRONG, problem, way_out)]


class NoAdminPart(AdminPart):
    """The commands' operations on a broker in which nothing waits."""

    name = parking = "nothing"

    def declare(self, queues: Sequence[Any]) -> Told:
        return Told({}, [])

    def status(self) -> Told:
        return Told({}, [])

    def backlog(self) -> Backlog:
        return Backlog(0, 0)

    def purge(self) -> int:
        return 0


class StoreDelayingTransport(DelayingTransport):
    """A mixin for kombu's transports: delayed tasks wait in a store."""

    has_store = True

    def __init__(self, client: Any, **kwargs: Any) -> None:
        super().__init__(client, **kwargs)  # type: ignore[call-arg]
        self._woken: Event | None = None

    def waker(self) -> Callable[[], None]:
        """Return a thread-safe function that lets kombu poll the broker at once."""
        if self._woken is None:
            self._woken = Event()
        return self._woken.set

    def drain_events(self: Any, connection: Any, timeout: float | None = None) -> Any:
        if self._woken is None or not self.polling_interval or not timeout:
            return super().drain_events(connection, timeout=timeout)  # type: ignore[misc]
        try:
            return super().drain_events(connection, timeout=0)  # type: ignore[misc]
        except TimeoutError:
            self._woken.wait(min(self.polling_interval, timeout))
            self._woken.clear()
            raise

    def store_url(self, settings: DelaySettings) -> str | None:
        """Return the URL of the store; None if there is none."""
        return settings.store


class FolderChannel(StoreDelayingChannel):
    """A mixin for kombu's filesystem channel: it writes and reads only complete message files.

    kombu creates each file under the final name. A consumer that reads the file too early gets an
    empty file, loses the message, and ends. So this package writes under another name, and then
    renames the file. Its consumers wait for the files that kombu itself writes.
    https://github.com/celery/kombu/blob/v5.5.0/kombu/transport/filesystem.py#L238
    """

    def _put(self, queue: str, message: dict[str, Any], **kwargs: Any) -> Any:
        if underway.get() is not None or self.stored_us(message, self.due_of(message)) is not None:
            return super()._put(queue, message, **kwargs)
        return self._put_file(queue, message)

    def put_due(self: Any, message: dict[str, Any], entry: StoreEntry) -> None:
        bound = self.get_table(entry.exchange) if entry.queue is None else ()
        for queue in [entry.queue] if entry.queue else [each.queue for each in bound]:
            # Without the folder, the broker is away: this is an OSError, and refuses no message.
            put_file(self, queue, dumps(message))

    def _put_file(self, queue: str, message: dict[str, Any]) -> None:
        try:
            put_file(self, queue, dumps(message))
        except OSError as exc:
            raise ChannelError(f"Cannot add a file for {queue!r} to directory: {exc}") from exc

    def _get(self, queue: str, **kwargs: Any) -> Any:
        if is_next_unfinished(self, queue):
            raise Empty
        return super()._get(queue, **kwargs)  # type: ignore[misc]


class DatabaseChannel(StoreDelayingChannel):
    """A mixin for sqlalchemy channels, which hides our options from SQLAlchemy's engine."""

    def _engine_from_config(self: Any) -> Any:
        client = self.connection.client
        known = SimpleNamespace(
            hostname=client.hostname, transport_options=_for_engines(client.transport_options)
        )
        stand_in = SimpleNamespace(connection=SimpleNamespace(client=known))
        return super()._engine_from_config.__func__(stand_in)  # type: ignore[misc]

    def _get_or_create(self: Any, queue: str) -> Any:
        """Find or make the row of a queue, which another process may make at the same time."""
        from sqlalchemy.exc import IntegrityError  # the other transports do without SQLAlchemy

        try:
            return super()._get_or_create(queue)  # type: ignore[misc]
        except IntegrityError:
            self.session.rollback()
            return super()._get_or_create(queue)  # type: ignore[misc]


class DatabaseTransport(StoreDelayingTransport):
    """A mixin for sqlalchemy transports: by default, tasks wait in the broker's database."""

    def establish_connection(self: Any) -> Any:
        options = self.client.transport_options
        if not self.delaying and OPTION in options:
            self.client.transport_options = _for_engines(options)
        return super().establish_connection()

    def store_url(self: Any, settings: DelaySettings) -> str:
        return settings.store or str(self.client.hostname)


def _for_engines(options: dict[str, Any]) -> dict[str, Any]:
    """Return the options for SQLAlchemy: all except ``native_delay`` and ``polling_interval``."""
    ours = (OPTION, "polling_interval")
    return {name: value for name, value in options.items() if name not in ours}


def delaying(kombus: type[virtual.Transport]) -> type[virtual.Transport]:
    """Create a subclass of kombu's transport whose delayed tasks wait in a store."""
    plain = kombus.Channel
    is_database = hasattr(plain, "_engine_from_config")
    mixin: type = StoreDelayingChannel
    if is_database:
        mixin = DatabaseChannel
    elif is_folder(plain):
        mixin = FolderChannel
    names: dict[str, Any] = {"__module__": __name__}
    if plain.Message is not virtual.Message:
        names["Message"] = type("Message", (VirtualMessage, plain.Message), {})
    names["disconnected"] = disconnected_of(kombus)
    channel = type("Channel", (mixin, plain), names)
    return type(
        "Transport",
        (DatabaseTransport if is_database else StoreDelayingTransport, kombus),
        {"__module__": __name__, "delaying_channel": channel},
    )


def disconnected_of(kombus: type[virtual.Transport]) -> type[Exception]:
    """Return the error class that kombu's transport treats as a lost connection."""
    found: type[Exception] = RecoverableConnectionError
    recoverable = getattr(kombus, "recoverable_connection_errors", kombus.connection_errors)
    if not issubclass(found, recoverable):
        found = type("Disconnected", (found, recoverable[0]), {})
    return found


_transports: dict[str, type[virtual.Transport]] = {}


def transport_of(alias: str) -> type[virtual.Transport]:
    """Return this package's transport for kombu's *alias*, such as "filesystem"."""
    if alias not in _transports:
        original = originals[alias]
        found = original() if callable(original) else symbol_by_name(original)
        _transports[alias] = delaying(symbol_by_name(found))
    return _transports[alias]


def is_folder(channel: Any) -> bool:
    """Return True if *channel* is a channel of kombu's filesystem transport."""
    return hasattr(channel, "data_folder_out")


def is_next_unfinished(channel: Any, queue: str) -> bool:
    """Return True if a producer without this package still writes the queue's next message."""
    with os.scandir(channel.data_folder_in) as found:
        files = {each.name: each.path for each in found if each.name.endswith(f".{queue}.msg")}
    return any(_is_unfinished(files[name]) for name in nsmallest(_LOOKED_AT, files))


def _is_unfinished(path: str) -> bool:
    try:
        with Path(path).open("rb") as file:
            found = os.fstat(file.fileno())
            file.seek(max(found.st_size - 1, 0))
            return file.read() != b"}" and time() - found.st_mtime < _WRITING_SECONDS
    except OSError:
        return False  # another consumer has taken the message


def put_file(channel: Any, queue: str, envelope: str) -> None:
    """Write a message as a complete JSON file into the transport's folder."""
    folder = Path(channel.data_folder_out)
    name = f"{round(monotonic() * 1000)}_{uuid4()}"
    # Without the queue's name: kombu 5.5's consumers look for that name anywhere in a file's name.
    unfinished = folder / f"{name}.unfinished"
    try:
        unfinished.write_bytes(envelope.encode())
        unfinished.rename(folder / f"{name}.{queue}.msg")
    except OSError as exc:
        with suppress(OSError):
            unfinished.unlink()
        if exc.errno in _BY_NAME and folder.is_dir():
            raise ChannelError(f"Cannot add file for {queue!r} to directory") from exc
        raise


def __getattr__(name: str) -> Any:
    if name in originals:
        return transport_of(name)
    raise AttributeError(name)

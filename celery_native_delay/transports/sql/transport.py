"""Subclasses of kombu's transports for brokers that cannot delay: messages wait in a database.

Examples are the transports ``filesystem``, ``mongodb`` and ``sqlalchemy``. Each subclass is
created at the first use of its transport. Without the transport option ``native_delay``, the
subclass behaves exactly like kombu's transport.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from queue import Empty
from threading import Event
from types import SimpleNamespace
from typing import Any

from amqp.exceptions import RecoverableConnectionError
from kombu.exceptions import ChannelError
from kombu.transport import virtual
from kombu.utils.imports import symbol_by_name
from kombu.utils.json import dumps

from ...errors import NativeDelayError, UnsupportedBroker
from ...rates.line import Lines
from ...records.interface import Records
from ...records.opened import RecordsLocation
from ...records.publishing import RecordedPublish, underway
from ...records.waiting import WaitingTasks
from ...settings import DelaySettings, is_store_url
from ...urls import without_password
from ..aliases import OPTION, originals
from ..interface import AdminPart, WorkerPart
from ..moving import MovingPart
from ..virtual.channel import DelayingChannel, DelayingTransport, Message
from .whole_files import is_folder, is_next_unfinished, put_file


class StoreDelayingChannel(DelayingChannel):
    """A mixin for kombu's channels: delayed messages wait in a database."""

    def make_delays(self: Any, settings: DelaySettings) -> Any:
        url = self.connection.store_url(settings)
        delays: Any
        try:
            _require_sqlalchemy()
        except UnsupportedBroker as exc:
            delays = _Refusing(exc)
        else:
            from .delays import Delays

            delays = Delays(settings, url)
        if not is_store_url(url):
            delays.refusal = UnsupportedBroker(
                "expected native_delay_store to be the URL of a database, such as "
                "sqlite:////var/lib/shop/delays.db: this broker cannot delay by itself"
            )
        return delays

    def worker_part(self, settings: DelaySettings) -> WorkerPart:
        _require_sqlalchemy()
        from .worker_part import StoreWorkerPart

        return StoreWorkerPart(self, settings)

    def admin_part(self, settings: DelaySettings) -> AdminPart:
        _require_sqlalchemy()
        from .admin_part import StoreAdminPart

        return StoreAdminPart(self)

    def moving_part(self, settings: DelaySettings) -> MovingPart:
        _require_sqlalchemy()
        from .moving import StoreMovingPart

        return StoreMovingPart(self)

    def waiting_tasks(self, settings: DelaySettings) -> WaitingTasks:
        _require_sqlalchemy()
        from .waiting import StoreWaitingTasks

        return StoreWaitingTasks(self)

    def lines(self, settings: DelaySettings) -> Lines:
        from ...rates.in_records import RecordLines

        return RecordLines(self.records(settings))

    def let_wait(self, queue: str, message: dict[str, Any], *, due_us: int, **kwargs: Any) -> None:
        self.delays.publish(message, queue, due_us=due_us)

    def records(self, settings: DelaySettings) -> Records:
        records: Records = self.delays.records
        return records

    def let_wait_keyed(self, queue: str, message: dict[str, Any], keyed: RecordedPublish) -> None:
        self.delays.publish_keyed(keyed, message, queue)

    def _put_fanout(
        self, exchange: str, message: dict[str, Any], routing_key: str, **kwargs: Any
    ) -> Any:
        self.check_unkeyed(message, exchange)
        due_us = self.due_of(message)
        if due_us is None:
            return super()._put_fanout(exchange, message, routing_key, **kwargs)  # type: ignore[misc]
        return self.delays.publish(message, "", due_us=due_us)


def _require_sqlalchemy() -> None:
    """Raise UnsupportedBroker if SQLAlchemy 2 is not installed."""
    try:
        from . import store  # noqa: F401
    except ImportError as exc:
        raise UnsupportedBroker(
            f"messages wait in a database here, which needs SQLAlchemy 2: "
            f"pip install 'celery_native_delay[sql]' ({exc})"
        ) from exc


class _Refusing:
    """Replaces ``Delays`` if SQLAlchemy is not installed: every method call raises an error."""

    def __init__(self, refusal: NativeDelayError) -> None:
        self.refusal = refusal

    def __getattr__(self, name: str) -> Any:
        raise self.refusal


class StoreDelayingTransport(DelayingTransport):
    """A mixin for kombu's transports: delayed messages wait in a database."""

    def __init__(self, client: Any, **kwargs: Any) -> None:
        super().__init__(client, **kwargs)  # type: ignore[call-arg]
        self._woken: Event | None = None
        if self.delaying:
            with suppress(UnsupportedBroker):  # the first delayed publish raises it
                _require_sqlalchemy()  # the import takes up to a second

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

    def waits_in(self: Any, settings: DelaySettings) -> str:
        return f"{settings.namespace} of {without_password(self.store_url(settings))}"

    def own_records(self: Any, settings: DelaySettings) -> RecordsLocation | None:
        """Return the address of the database that stores task state, such as debounce keys."""
        url = self.store_url(settings)
        return RecordsLocation(url, settings.namespace) if is_store_url(url) else None

    def bulk_publisher(self: Any, *, window: int) -> Any:
        _require_sqlalchemy()
        from ..virtual.template import publisher
        from .outbox import Outbox

        return publisher(Outbox(self.client, window))

    def store_url(self, settings: DelaySettings) -> str:
        return settings.store or "native_delay_store, which is not set"


class FolderChannel(StoreDelayingChannel):
    """A mixin for kombu's filesystem channel: it writes and reads only complete message files."""

    def _put(self, queue: str, message: dict[str, Any], **kwargs: Any) -> Any:
        if self.due_of(message) is not None or underway.get() is not None:
            return super()._put(queue, message, **kwargs)
        try:
            return put_file(self, queue, dumps(message))
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


class DatabaseTransport(StoreDelayingTransport):
    """A mixin for sqlalchemy transports: by default, messages wait in the broker's database."""

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
    """Create a subclass of kombu's transport that stores delayed messages in a database."""
    plain = kombus.Channel
    is_database = hasattr(plain, "_engine_from_config")
    mixin: type = StoreDelayingChannel
    if is_database:
        mixin = DatabaseChannel
    elif is_folder(plain):
        mixin = FolderChannel
    names: dict[str, Any] = {"__module__": __name__}
    if plain.Message is not virtual.Message:
        names["Message"] = type("Message", (Message, plain.Message), {})
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

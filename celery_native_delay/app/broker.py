"""Connects to an app's broker, and adds the broker's URL to errors."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from time import monotonic
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from celery.utils.imports import symbol_by_name
from kombu import pools
from kombu.exceptions import OperationalError
from kombu.transport import TRANSPORT_ALIASES

from ..errors import UnsupportedBroker
from ..settings import DelaySettings
from ..transports.aliases import OPTION, limited, needs_store, transport_of
from ..urls import without_password

_WAY_TO_STORE = (
    "set native_delay_store to the URL of a database, such as "
    '"sqlite:////var/lib/shop/delays.db", in workers and producers'
)


def check_fits(connection: Any, settings: DelaySettings) -> None:
    """Raise UnsupportedBroker if the broker cannot delay and ``native_delay_store`` is None."""
    if transport_of(connection.transport_cls, store=settings.store) is None:
        raise UnsupportedBroker(why_nothing_waits(connection.transport_cls))


def why_nothing_waits(transport: Any) -> str:
    """Return an error text about a kombu transport that cannot delay tasks."""
    shown = transport if transport in TRANSPORT_ALIASES else repr(transport)
    if needs_store(transport):
        return f"native delay has no store for {shown}: {_WAY_TO_STORE}"
    return f"native delay does not support {shown}"


@contextmanager
def without_traceback() -> Iterator[None]:
    """Make Celery's commands print an UnsupportedBroker without a traceback."""
    try:
        yield
    except UnsupportedBroker as exc:
        click = sys.modules.get("click")
        if click is None or click.get_current_context(silent=True) is None:
            raise
        # click prints a ClickException in one sentence; callers expect an UnsupportedBroker.
        error = type("UnsupportedBroker", (UnsupportedBroker, click.ClickException), {})
        raise error(str(exc)) from exc


def name_broker(error: OperationalError, app: Any) -> None:
    """Add the URL of the app's broker to an error from kombu."""
    if not hasattr(error, "__notes__"):
        error.add_note(f"the broker is {shown_broker(app)}")


def shown_broker(app: Any) -> str:
    """Return the URLs of the app's broker as text, without passwords."""
    connection = app.connection_for_write()
    urls = [without_password(url) for url in connection.alt]
    return " or ".join(urls) if len(urls) > 1 else without_password(connection.as_uri())


T = TypeVar("T")


def unconnected(app: Any) -> Any:
    """Return a connection for what needs the store alone, which never connects to the broker.

    Returns None without ``native_delay_store``, and for other brokers than RabbitMQ.
    """
    connection = app.connection_for_write()
    name = getattr(connection.get_transport_cls(), "unconnected", None)
    option = (connection.transport_options or {}).get(OPTION)
    if name is None or not isinstance(option, dict) or "store" not in option:
        return None
    connection._transport = symbol_by_name(name)(connection)  # a copy of the connection connects
    return connection


#: A single broker that has kept us waiting for so many seconds is not tried a second time.
_SLOW_SECONDS = 1.0


#: The attribute of the app's own pool that keeps the pool beside it.
_BOUNDED = "native_delay_bounded"


def bounded_connection(app: Any) -> Any:
    """Make a connection with ``answer_limits``, where the app's own options set none."""
    return limited(app.connection_for_write())


@contextmanager
def bounded(app: Any) -> Iterator[Any]:
    """Yield a :func:`bounded_connection`, from a pool of such connections."""
    own = app.pool  # also sets the limit of all pools
    if not hasattr(own, _BOUNDED):  # looking the pool up takes longer than a question
        setattr(own, _BOUNDED, pools.connections[bounded_connection(app)])
    with getattr(own, _BOUNDED).acquire(block=True) as connection:
        yield connection


def opened(app: Any, connection: Any) -> Any:
    """Open *connection*; while the broker is away, return one that is enough to ask the store.

    Raises OperationalError if the app has no such connection.
    """
    if is_away(app) and (alone := unconnected(app)) is not None:
        return alone
    try:
        _open(connection)
    except OperationalError:
        note_away(app)
        if (alone := unconnected(app)) is None:
            raise
        return alone
    return connection


def _open(connection: Any) -> None:
    timeout = None if connection.alt[1:] else _SLOW_SECONDS
    connection.ensure_connection(max_retries=1, interval_start=0, timeout=timeout)


def reach(app: Any) -> None:
    """Connect to the broker if no pooled connection is open. Raises OperationalError."""
    with app.producer_pool.acquire(block=True) as producer:
        producer.connection.ensure_connection(max_retries=1, interval_start=0, interval_step=0)


def ask_on_a_connection(app: Any, question: Callable[[Any], T]) -> T:
    """Call the function *question* with a pooled connection; retry once after a lost connection.

    While the broker is away, *question* gets a connection that is enough to ask the store.
    """
    if is_away(app) and (alone := unconnected(app)) is not None:
        with suppress(OperationalError):  # it needs the broker
            return question(alone)
    try:
        return _ask_connected(app, question)
    except OperationalError as exc:
        note_away(app)
        if (alone := unconnected(app)) is not None:
            with suppress(OperationalError):
                return question(alone)
        name_broker(exc, app)
        raise


#: Seconds without an attempt to connect, after one that failed, where a store needs no broker.
AWAY_SECONDS = 5.0

#: When they end, in monotonic seconds, by app.
_away_until: WeakKeyDictionary[Any, float] = WeakKeyDictionary()


def is_away(app: Any) -> bool:
    """Return True if the broker was away a moment ago."""
    return monotonic() < _away_until.get(app, 0.0)


def note_away(app: Any) -> None:
    """Let :func:`is_away` return True for a moment."""
    _away_until[app] = monotonic() + AWAY_SECONDS


def _ask_connected(app: Any, question: Callable[[Any], T]) -> T:
    with bounded(app) as connection:
        for last_try in (False, True):
            try:
                _open(connection)
                return question(connection)
            except connection.recoverable_connection_errors as exc:
                connection.collect()
                # redis-py has a class of its own for the builtin TimeoutError.
                if type(exc).__name__ == TimeoutError.__name__:
                    said = f"{exc}: it gave no answer in time, and may yet do what was asked"
                    raise OperationalError(said) from exc
                # A pooled connection notices a restarted broker only when it is used.
                if last_try:
                    raise OperationalError(str(exc)) from exc
    raise AssertionError("unreachable")

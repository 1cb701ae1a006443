"""The settings of an app, and the methods that ``install(app)`` replaces."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import partial
from types import ModuleType
from typing import Any, TypeVar

import celery
from celery import Celery
from celery._state import get_current_task
from celery.local import Proxy
from kombu import Connection
from kombu.exceptions import OperationalError
from kombu.utils.uuid import uuid

from ..due_time import check_countdown, due_us_or_none
from ..errors import SettingsError, UnsupportedBroker, errors_ignored
from ..keyed.record import HEADER as KEY
from ..message import TENANT
from ..now import time_ns
from ..rates.declared import DeclaredKey
from ..records.publishing import underway
from ..settings import DRAIN, DelaySettings, tenants_of
from ..store.joined import outside_transaction
from ..transports.aliases import OPTION, option_of, transport_of, url_errors_explained
from ..transports.interface import AdminPart
from .broker import (
    ask_on_a_connection,
    check_fits,
    is_away,
    name_broker,
    note_away,
    reach,
    unconnected,
    why_nothing_waits,
    without_traceback,
)

logger = logging.getLogger(__name__)

T = TypeVar("T")

PREFIX = "native_delay_"

#: About thirty years in seconds: Celery cannot compute an ETA from a much longer countdown.
LONGEST_CELERY_SECONDS = 1e9

#: The position of ``countdown`` in Celery's ``send_task``, which is the first of its options.
_OPTIONS_AT = 3

#: URLs to use instead, by the driver type of kombu's other transport for the same broker.
EXPECTED_URLS = {
    "amqp": "amqp:// or amqps:// (py-amqp)",
    "redis": "redis://, rediss://, redis+socket:// or sentinel://",
    "sqs": "sqs://",
}


class Installation:
    """The settings of one app, and replacements for methods of the app."""

    def __init__(self, app: Celery, keywords: dict[str, Any]) -> None:
        self.app = app
        self.keywords = keywords
        self._earlier_connection = vars(app).get("_connection")
        #: The ``send_task`` that the app object had before ``install``; None if only its class had.
        self.earlier_send_task = vars(app).get("send_task")
        self._earlier_task_from_fun = vars(app).get("_task_from_fun")
        self._earlier_register_task = vars(app).get("register_task")
        self._connected_delays: bool | None = None
        #: True if tasks can go into the store while the broker is away; None before a connection.
        self._writes_alone: bool | None = None
        self._warned_of: set[str] = set()
        self.raises_if_unsupported = False
        """True in a ``delay`` command, which raises an error for an unsupported broker."""
        self._is_sqs = False
        self._tenants: dict[str, DeclaredKey] | None = None
        self.keys: dict[str, DeclaredKey] | None = None
        """The declared keys by task name; None until the first task is sent."""
        self.send_declared: Callable[..., Any] = lambda *_, **__: None
        """Sends a task under its declared key. Set by ``install()``."""
        self.test_broker: str | None = None
        """The URL that replaces the app's broker URL in tests with the test clock."""

    def settings(self) -> DelaySettings:
        """Return the app's settings. A keyword of ``install()`` overrides the app's configuration.

        Raises:
            SettingsError: the name of a setting is unknown, or its value is invalid.
        """
        return DelaySettings.from_mapping(_configured(self.app) | self.keywords)

    def has(self, name: str) -> bool:
        """Return True if the setting *name* has a truthy value, even an invalid value."""
        return bool((_configured(self.app) | self.keywords).get(name))

    @property
    def enabled(self) -> bool:
        return self._enabled is not False

    @property
    def delays_new(self) -> bool:
        """True if new tasks wait in the broker: the app is neither off nor draining."""
        return self.enabled and self._enabled != DRAIN

    @property
    def _enabled(self) -> Any:
        return self.keywords.get("enabled", self.app.conf.get(f"{PREFIX}enabled", True))

    @property
    def keeps_celerys_off(self) -> bool:
        """True if Celery's own delayed delivery is off for this app."""
        # Every delayed publish reads this property, so the last connection's value is kept.
        return self.delays_new if self._connected_delays is None else self._connected_delays

    # --- what replaces the app's own ----------------------------------------------------

    # They hand on exactly what their caller passed: a subclass may take less than Celery does.

    def connection(self, *args: Any, **kwargs: Any) -> Connection:
        """Make a broker connection that can delay messages. Replaces ``app._connection``."""
        # The method is looked up each time: other code, such as an APM, may replace it later.
        connect = self._earlier_connection or partial(type(self.app)._connection, self.app)
        if self.test_broker is not None:
            args = (self.test_broker, *args[1:])
        self._connected_delays = self.delays_new
        if not self.enabled:
            return connect(*args, **kwargs)
        with without_traceback():
            with url_errors_explained():
                connection = connect(*args, **kwargs)
                transport = connection.get_transport_cls()
            settings = self._settings_or_error()
            # Only there the store can be written without the broker.
            self._writes_alone = (
                isinstance(settings, DelaySettings)
                and settings.store is not None
                and hasattr(transport, "unconnected")
            )
            self._is_sqs = transport.driver_type == "sqs"
            self._tenants = tenants_of(settings) if isinstance(settings, DelaySettings) else {}
            if self._fits(connection, settings):
                options = {OPTION: option_of(settings)} | (connection.transport_options or {})
                connection.transport_options = options
        return connection

    def send_task(self, *args: Any, **options: Any) -> Any:
        """Check the countdown, then call the ``send_task`` that this method replaces."""
        if (keyed := self._sent_by_key(args, options)) is not None:
            return keyed
        self._name_tenant(args, options)
        countdown = args[3] if len(args) > 3 else options.get("countdown")
        # The channel checks all other countdowns when it publishes. NaN is caught here, too.
        if isinstance(countdown, int | float) and not countdown < LONGEST_CELERY_SECONDS:
            settings = self._settings_or_error()
            known = settings if isinstance(settings, DelaySettings) else DelaySettings()
            check_countdown(countdown, longest_delay_seconds=known.longest_delay_seconds)
        send_task = self.earlier_send_task or partial(type(self.app).send_task, self.app)
        try:
            with outside_transaction() if _is_retry(options) else nullcontext():
                return self._send(send_task, args, options)
        except OperationalError as exc:
            if options.get("connection") is None and options.get("producer") is None:
                name_broker(exc, self.app)
            raise

    def _sent_by_key(self, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        """Send a task with a declared key, as ``Delay(app)`` does; None if it has none."""
        name = str(args[0] if args else options.get("name"))
        task = options.get("task_type") or self.app._tasks.get(name)
        declared = self.declared_key(name, task)
        if declared is None or not self.delays_new:
            return None
        # The message of Delay(app) itself, of a schedule entry, or of a retry.
        if underway.get() or KEY in (options.get("headers") or {}) or _is_retry(options):
            return None
        named = dict(zip(_SEND_TASK, args, strict=False))
        return self.send_declared(self, declared, task, **named, **options)

    def declared_key(self, name: str, task: Any) -> DeclaredKey | None:
        """Return the key that is declared for a task, by ``install`` or by its decorator."""
        if self.keys is None:
            settings = self._settings_or_error()
            self.keys = dict(settings.keys) if isinstance(settings, DelaySettings) else {}
        declared = self.keys.get(name) or getattr(task, "key", None)
        return declared if isinstance(declared, DeclaredKey) else None

    def _name_tenant(self, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        """Write the tenant of a task on SQS into its headers, for SQS's fair queues."""
        if self._tenants is None:
            self._tenants = {}
            with errors_ignored():  # the send itself raises them
                self.app.connection_for_write()  # sets both, and opens nothing
        if not self._is_sqs:
            return
        named = dict(zip(_SEND_TASK, args, strict=False)) | options
        task = named.get("task_type") or self.app._tasks.get(named.get("name"))
        key = (self._tenants or {}).get(str(named.get("name"))) or getattr(task, "key", None)
        headers = dict(named.get("headers") or {})
        if not isinstance(key, DeclaredKey) or TENANT in headers:
            return
        with errors_ignored():  # of the user's callables: then the task has no tenant
            call = named.get("args") or (), named.get("kwargs") or {}
            tenant = key.key_of(*call, headers, getattr(task, "run", None))
            if tenant is not None:
                options["headers"] = headers | {TENANT: tenant}

    def _send(
        self, send_task: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any]
    ) -> Any:
        """Call *send_task*. A task of the store is written there, although the broker is away."""
        if self._writes_alone is None:
            self._writes_alone = self.has("store")
        theirs = options.get("connection") is not None or options.get("producer") is not None
        if theirs or not self._writes_alone or len(args) > _OPTIONS_AT:
            return send_task(*args, **options)
        options["task_id"] = options.get("task_id") or uuid()  # the same at the second attempt
        lost: OperationalError | None = None
        if not is_away(self.app):
            is_sent = False
            try:
                if self.app.pool.limit:  # otherwise each question is a connection more
                    reach(self.app)
                is_sent = True
                return send_task(*args, **options)
            except OperationalError as exc:
                lost = exc if is_sent else None
                note_away(self.app)
        connection = unconnected(self.app)
        if connection is not None and _goes_into_store(connection.default_channel, args, options):
            producer = self.app.amqp.Producer(connection, auto_declare=False)
            return send_task(*args, **{**options, "producer": producer})
        if lost is not None:
            raise lost
        return send_task(*args, **options)  # with Celery's retries

    def task_from_fun(self, *args: Any, **options: Any) -> Any:
        """Make a task by the ``_task_from_fun`` that ``install`` replaces."""
        make = self._earlier_task_from_fun or partial(type(self.app)._task_from_fun, self.app)
        return make(*args, **options)

    def register_task(self, *args: Any, **options: Any) -> Any:
        """Register a task by the ``register_task`` that ``install`` replaces."""
        register = self._earlier_register_task or partial(type(self.app).register_task, self.app)
        return register(*args, **options)

    def _settings_or_error(self) -> DelaySettings | SettingsError:
        try:
            return self.settings()
        except SettingsError as exc:
            return exc

    def _fits(self, connection: Connection, settings: DelaySettings | SettingsError) -> bool:
        """Return True if the transport of *connection* can delay; otherwise warn in the log.

        The only exceptions: this method raises UnsupportedBroker in a ``delay`` command, or if
        another URL of the same broker, such as ``pyamqp://``, can delay.
        """
        name = connection.transport_cls
        # With wrong settings take our transport: then a delayed publish raises the error.
        store = settings.store if isinstance(settings, DelaySettings) else ""
        if transport_of(name, store=store) is not None:
            return True
        transport = connection.get_transport_cls()
        expected = EXPECTED_URLS.get(getattr(transport, "driver_type", ""))
        if expected is not None:
            raise UnsupportedBroker(
                f"expected a broker URL that starts with {expected}, got the "
                f"transport {name!r}, which cannot delay: use pyamqp:// to avoid librabbitmq, "
                f"remove broker_transport, or set native_delay_enabled = False"
            )
        why = why_nothing_waits(name)
        if self.raises_if_unsupported:
            raise UnsupportedBroker(why)
        if name not in self._warned_of:
            self._warned_of.add(name)
            logger.warning("delayed tasks wait in the memory of workers, as in Celery: %s", why)
        return False


def checked_app(app: Any) -> Any:
    """Return *app* without its proxy. Raises TypeError if *app* is not a Celery app."""
    real = app._get_current_object() if isinstance(app, Proxy) else app
    if not isinstance(real, Celery):
        raise TypeError(f"expected a Celery app, got {real!r}")
    return real


def installation_of(app: Any) -> Installation | None:
    """Return the :class:`Installation` of *app*, or None if ``install(app)`` was not called."""
    real = app._get_current_object() if isinstance(app, Proxy) else app
    installation: Installation | None = vars(real).get("_native_delay")
    return installation


def is_in_clock(app: Any) -> bool:
    """Return True within the ``with`` block of a test clock, which has a store of its own."""
    installation = installation_of(app)
    return installation is not None and installation.test_broker is not None


def installed(app: Any) -> Installation:
    """Return the :class:`Installation` of *app*. Raises SettingsError without ``install(app)``."""
    found = installation_of(checked_app(app))
    if found is None:
        raise SettingsError(
            f"native delay is not installed in {app!r}: "
            f"add `from celery_native_delay import install; install(app)` to its module"
        )
    return found


def ask_broker(app: Any, question: Callable[[Any, DelaySettings], T]) -> T:
    """Call the function *question* with a broker channel and the app's settings."""

    def ask(connection: Any) -> T:
        return question(*delaying_channel(app, connection))

    return ask_on_a_connection(app, ask)


def delaying_channel(app: Any, connection: Any) -> tuple[Any, DelaySettings]:
    """Return the default channel of *connection*, and the app's settings.

    Raises:
        SettingsError: ``install(app)`` was not called, or a setting is invalid.
        UnsupportedBroker: this broker cannot delay tasks.
    """
    settings = installed(app).settings()
    if not settings.enabled:
        raise UnsupportedBroker(
            "native_delay_enabled is off in this app: no task waits in its broker. To list, cancel "
            f'and deliver tasks that still wait there, set native_delay_enabled = "{DRAIN}"'
        )
    check_fits(connection, settings)
    return connection.default_channel, settings


def _configured(app: Celery) -> dict[str, Any]:
    """Return the app's settings of this package, by name without the prefix ``native_delay_``."""
    app.conf.get("broker_url")  # loads a pending configuration
    namespace = (app.namespace or "").lower().rstrip("_")
    found: dict[str, Any] = {}
    for mapping in reversed(app.conf.maps):
        for key in list(mapping):
            name = str(key).lower()
            if namespace:
                name = name.removeprefix(f"{namespace}_")
            if name.startswith(PREFIX):
                found[name.removeprefix(PREFIX)] = mapping[key]
    return found


def keep_celerys_own_off(module: ModuleType) -> None:
    """Patch a Celery module: apps with ``install(app)`` skip Celery's own delayed delivery."""
    original = getattr(module, "detect_quorum_queues", None)
    if original is None:
        raise UnsupportedBroker(
            f"expected {module.__name__}.detect_quorum_queues, which Celery 5.5 to 5.7 have, "
            f"found none in Celery {celery.__version__}: use a supported release, or Celery's own "
            f"delayed delivery would delay, too"
        )
    if not hasattr(original, "native_delay_original"):
        vars(module)["detect_quorum_queues"] = _unless_installed(original)


def _unless_installed(original: Any) -> Any:
    def detect_quorum_queues(app: Any, driver_type: str) -> tuple[bool, str]:
        installation = installation_of(app)
        if installation is not None and installation.keeps_celerys_off:
            return False, ""
        result: tuple[bool, str] = original(app, driver_type)
        return result

    detect_quorum_queues.native_delay_original = original  # type: ignore[attr-defined]
    return detect_quorum_queues


def admin_part(app: Any, connection: Any) -> AdminPart:
    """Return an ``AdminPart``, through which ``delay`` commands use the app's broker."""
    channel, settings = delaying_channel(app, connection)
    part: AdminPart = channel.admin_part(settings)
    part.serve(list(app.amqp.queues.values()))
    return part


def _goes_into_store(channel: Any, args: tuple[Any, ...], options: Mapping[str, Any]) -> bool:
    """Return True if a task waits in the store, has a key, or is sent in the user's transaction."""
    if underway.get() is not None:  # with the state of its key, in one step
        return True
    headers = {"task": args[0] if args else options.get("name")}
    due_us, countdown = due_us_or_none(options.get("eta")), options.get("countdown")
    if isinstance(countdown, int | float) and countdown:  # Celery then ignores the ETA
        due_us = time_ns() // 1000 + round(max(countdown, 0) * 1_000_000)
    return channel.due_in_store(headers, due_us) is not None


#: The positional arguments of Celery's ``send_task``.
_SEND_TASK = ("name", "args", "kwargs", "countdown", "eta", "task_id")


def _is_retry(options: Mapping[str, Any]) -> bool:
    """Return True for a retry of the task that runs: a rollback of the task must not undo it."""
    # A RetryAfter that does not count has retries=0. Other tasks are sent without this option.
    task = get_current_task() if options.get("retries") is not None else None
    return task is not None and task.request.id == options.get("task_id")

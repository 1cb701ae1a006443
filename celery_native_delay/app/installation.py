"""An app's installation: its settings, and what stands in for methods of the app."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial
from types import ModuleType
from typing import Any, TypeVar

import celery
from celery import Celery
from celery.local import Proxy
from kombu import Connection
from kombu.exceptions import OperationalError

from ..due_time import check_countdown
from ..errors import SettingsError, UnsupportedBroker
from ..records.opened import Place
from ..settings import DelaySettings
from ..transports.aliases import OPTION, option_of, transport_of, url_errors_explained
from ..transports.interface import AdminPart, ExpectsQueues, ServesQueues
from .broker import check_fits, name_broker, told_on_command_lines, why_nothing_waits

logger = logging.getLogger(__name__)

PREFIX = "native_delay_"

#: Roughly thirty years in seconds; from here on a countdown is checked before Celery computes.
LONGEST_CELERY_SECONDS = 1e9

#: Which URLs lead to our transports, by the driver type of the foreign one that a connection has.
EXPECTED_URLS = {
    "amqp": "amqp:// or amqps:// (py-amqp)",
    "redis": "redis://, rediss://, redis+socket:// or sentinel://",
    "sqs": "sqs://",
}


class Installation:
    """The settings and earlier methods of one app, as ``install`` keeps them."""

    def __init__(self, app: Celery, keywords: dict[str, Any]) -> None:
        self.app = app
        self.keywords = keywords
        self._earlier_connection = vars(app).get("_connection")
        #: What stood in the app's own ``send_task`` before, in front of its class's.
        self.earlier_send_task = vars(app).get("send_task")
        self._amqp: Any = None
        self._connected_enabled: bool | None = None
        self._warned_of: set[str] = set()
        self.insists = False
        """True if a broker in which nothing can wait is an error: for a command, not for an app."""

    def settings(self) -> DelaySettings:
        """The settings in force: configuration first, keywords of ``install()`` on top.

        Raises:
            SettingsError: a name is unknown or a value impossible.
        """
        return DelaySettings.from_mapping(_configured(self.app) | self.keywords)

    def has(self, name: str) -> bool:
        """True if the setting *name* is given at all, right or wrong."""
        return bool((_configured(self.app) | self.keywords).get(name))

    @property
    def enabled(self) -> bool:
        """True if delayed tasks wait in the broker.

        Only ``False`` brings Celery's own way back; any other wrong value is reported.
        """
        value = self.keywords.get("enabled", self.app.conf.get(f"{PREFIX}enabled", True))
        return value is not False

    @property
    def keeps_celerys_off(self) -> bool:
        """True if Celery's own delayed delivery is to stay out of the way.

        Asked with every delayed publish, where looking up a setting costs as much as all that we
        do to the message: as enabled as the connections that publish.
        """
        return self.enabled if self._connected_enabled is None else self._connected_enabled

    # --- what replaces the app's own ----------------------------------------------------

    def connection(self, *args: Any, **kwargs: Any) -> Connection:
        """``app._connection``, with delayed delivery asked for in its transport options."""
        # Looked up each time: the class's may be replaced after us, by an APM for one.
        connect = self._earlier_connection or partial(type(self.app)._connection, self.app)
        self._connected_enabled = self.enabled
        if not self._connected_enabled:
            return connect(*args, **kwargs)
        with told_on_command_lines():
            with url_errors_explained():
                connection = connect(*args, **kwargs)
                connection.get_transport_cls()
            settings = self._settings_or_error()
            if self._fits(connection, settings):
                options = {OPTION: option_of(settings)} | (connection.transport_options or {})
                connection.transport_options = options
        return connection

    def send_task(
        self,
        name: str,
        args: Any = None,
        kwargs: Any = None,
        countdown: Any = None,
        *more: Any,
        **options: Any,
    ) -> Any:
        """``app.send_task``, with countdowns that are no time refused in plain words."""
        # What the levels can hold is checked when the message is published; here only what
        # Celery cannot turn into an ETA. Written so that NaN is caught.
        if isinstance(countdown, int | float) and not countdown < LONGEST_CELERY_SECONDS:
            settings = self._settings_or_error()
            known = settings if isinstance(settings, DelaySettings) else DelaySettings()
            check_countdown(countdown, longest_delay_seconds=known.longest_delay_seconds)
        if self._amqp is not self.app.amqp:
            self._amqp = self.app.amqp
            if self.app.conf.task_protocol == 1:
                _give_eta_header(self._amqp)
        send_task = self.earlier_send_task or partial(type(self.app).send_task, self.app)
        try:
            return send_task(name, args, kwargs, countdown, *more, **options)
        except OperationalError as exc:
            if options.get("connection") is None and options.get("producer") is None:
                name_broker(exc, self.app)
            raise

    def _settings_or_error(self) -> DelaySettings | SettingsError:
        try:
            return self.settings()
        except SettingsError as exc:
            return exc

    def _fits(self, connection: Connection, settings: DelaySettings | SettingsError) -> bool:
        """True if a transport of ours serves *connection*.

        UnsupportedBroker: it reaches such a broker through a foreign class, or nothing fits, and
        ``native_delay_strict`` is on.
        """
        name = connection.transport_cls
        # Misconfigured, it is to be one of ours: so a producer that delays a message is told.
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
        problem, way_out = why_nothing_waits(name)
        if isinstance(settings, DelaySettings) and settings.strict:
            raise UnsupportedBroker(f"{problem}, and native_delay_strict is on{way_out}")
        if self.insists:
            raise UnsupportedBroker(f"{problem}{way_out}")
        if name not in self._warned_of:
            self._warned_of.add(name)
            logger.warning(
                "%s: tasks with an ETA stay with Celery, in the memory of its workers%s",
                problem,
                way_out,
            )
        return False


def checked_app(app: Any) -> Any:
    """The app itself, if it came as a proxy; TypeError for what is none."""
    real = app._get_current_object() if isinstance(app, Proxy) else app
    if not isinstance(real, Celery):
        raise TypeError(f"expected a Celery app, got {real!r}")
    return real


def installation_of(app: Any) -> Installation | None:
    """The installation of *app*, None if ``install`` was never called for it."""
    real = app._get_current_object() if isinstance(app, Proxy) else app
    installation: Installation | None = vars(real).get("_native_delay")
    return installation


def installed(app: Any) -> Installation:
    """The installation of *app*; SettingsError if ``install`` was never called for it."""
    found = installation_of(checked_app(app))
    if found is None:
        raise SettingsError(
            f"native delay is not installed in {app!r}: "
            f"add `from celery_native_delay import install; install(app)` to its module"
        )
    return found


def delaying_channel(app: Any, connection: Any) -> tuple[Any, DelaySettings]:
    """A channel of *connection*, which is one of *app*, and the settings to ask for its parts.

    See :mod:`~celery_native_delay.transports.interface`.

    Raises:
        SettingsError: the app is not installed, or its settings are wrong.
        UnsupportedBroker: no delayed task can wait there.
    """
    settings = installed(app).settings()
    if not settings.enabled:
        raise UnsupportedBroker(
            "native_delay_enabled is off in this app: nothing waits in its broker"
        )
    check_fits(connection, settings)
    channel = connection.default_channel
    if not hasattr(channel, "admin_part"):
        raise UnsupportedBroker(
            f"{connection.as_uri()} delays by itself: there is nothing to ask or to do there; to "
            f"list, cancel and move tasks, set native_delay_records in workers and producers"
        )
    return channel, settings


def _configured(app: Celery) -> dict[str, Any]:
    """The app's ``native_delay_*`` settings without their prefix, from any namespace."""
    app.conf.get("broker_url")  # reads a configuration that is still pending
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


def _give_eta_header(amqp: Any) -> None:
    """Put the ETA of task protocol 1, which is in the body, where a transport sees it, too."""
    original = amqp.task_protocols[1]
    if hasattr(original, "native_delay_original"):
        return

    def as_task_v1(*args: Any, **kwargs: Any) -> Any:
        message = original(*args, **kwargs)
        if message.body.get("eta"):
            message.headers["eta"] = message.body["eta"]
        return message

    as_task_v1.native_delay_original = original  # type: ignore[attr-defined]
    amqp.task_protocols[1] = as_task_v1
    vars(amqp).pop("create_task_message", None)


def keep_celerys_own_off(module: ModuleType) -> None:
    """Let quorum queues switch on Celery's own delayed delivery only for other apps.

    UnsupportedBroker: Celery decides it elsewhere, so both would delay.
    """
    original = getattr(module, "detect_quorum_queues", None)
    if original is None:
        raise UnsupportedBroker(
            f"expected {module.__name__}.detect_quorum_queues, which Celery 5.5 to 5.7 have, "
            f"found none in Celery {celery.__version__}: Celery's own delayed delivery could "
            f"not be kept off; use a supported release"
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


Part = TypeVar("Part")

#: Seconds for each answer of a broker that is looked at.
TIMEOUT_SECONDS = 5.0

#: Transport options for that; py-amqp takes the first two, redis-py the others, and either passes
#: over what is not its own.
_BOUNDED = {
    "read_timeout": TIMEOUT_SECONDS,
    "write_timeout": TIMEOUT_SECONDS,
    "socket_timeout": TIMEOUT_SECONDS,
    "socket_connect_timeout": TIMEOUT_SECONDS,
}


def bounded_connection(app: Any) -> Any:
    """A connection of *app* to look at its broker, whose every answer has a time limit."""
    return app.connection_for_write(
        connect_timeout=TIMEOUT_SECONDS, transport_options=dict(_BOUNDED)
    )


def records_place(app: Any, settings: DelaySettings) -> Place | None:
    """The place of records of the whole *app*, such as fenced runs; None if none can be kept.

    It is the same in every process and on every virtual host. No broker is asked.
    """
    if settings.records is not None:
        return Place(settings.records, settings.namespace)
    own_records = getattr(app.connection_for_write().transport, "own_records", None)
    return own_records and own_records(settings)


def admin_part(app: Any, connection: Any) -> AdminPart:
    """The admin part for the broker of *connection*, which is one of *app*."""
    channel, settings = delaying_channel(app, connection)
    part: AdminPart = channel.admin_part(settings)
    return serving(part, app)


def serving(part: Part, app: Any, queues: Sequence[str] | None = None) -> Part:
    """*part* itself, which knows now of *queues* if it must; None for all of the app's."""
    if isinstance(part, ExpectsQueues):
        part.expect(list(app.amqp.queues.values()))
    if isinstance(part, ServesQueues):
        part.serve(queues or [queue.name for queue in app.amqp.queues.values()])
    return part

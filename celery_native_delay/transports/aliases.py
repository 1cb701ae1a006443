"""Register this package's kombu transports under kombu's own aliases, such as ``amqp``.

A connection delays messages only with the transport option ``native_delay``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from datetime import datetime, timedelta
from typing import Any

from kombu import transport

from ..due_time import LONGEST_COUNTDOWN_SECONDS, check_countdown, due_us
from ..errors import InvalidDueTime, SettingsError, UnsupportedBroker
from ..now import utc_now
from ..settings import DelaySettings
from ..urls import without_password

#: The name of this package's option in a connection's ``transport_options``.
OPTION = "native_delay"

_RABBITMQ = "celery_native_delay.transports.rabbitmq"
_REDIS = "celery_native_delay.transports.redis"
_SQS = "celery_native_delay.transports.sqs"

_SQL = "celery_native_delay.transports.sql"
_PGMQ = "celery_native_delay.transports.pgmq"

#: kombu's transports whose brokers cannot delay: messages wait in ``native_delay_store``. gcpubsub
#: is missing: only the process that bound a queue knows the topic, which the dispatcher needs.
_WITHOUT_DELAYS = (
    "memory",
    "filesystem",
    "sqlalchemy",
    "sqla",
    "mongodb",
    "zookeeper",
    "consul",
    "etcd",
    "pyro",
    "SLMQ",
    "slmq",
    "azurestoragequeues",
    "azureservicebus",
    "confluentkafka",
    "kafka",
)

#: The transports whose broker is a database: messages wait in that database.
_OWN_STORE = ("sqlalchemy", "sqla")

#: Our class for each of kombu's aliases. kombu imports a module when it is first used.
ALIASES = {
    "amqp": f"{_RABBITMQ}:Transport",
    "pyamqp": f"{_RABBITMQ}:Transport",
    "amqps": f"{_RABBITMQ}:SSLTransport",
    "redis": f"{_REDIS}:Transport",
    "rediss": f"{_REDIS}:Transport",
    "sentinel": f"{_REDIS}:SentinelTransport",
    "sqs": f"{_SQS}:Transport",
    "SQS": f"{_SQS}:Transport",
    "pgmq": f"{_PGMQ}:Transport",
    **{alias: f"{_SQL}:{alias}" for alias in _WITHOUT_DELAYS},
}

#: The extra of this package that installs each Python package.
_EXTRAS = {"redis": "redis", "botocore": "sqs", "sqlalchemy": "sql"}

#: The value of kombu's ``TRANSPORT_ALIASES`` for each alias that this package replaced.
originals: dict[str, Any] = {}


def register_transports() -> None:
    for alias, path in ALIASES.items():
        present = transport.TRANSPORT_ALIASES.get(alias)
        if present is not None and present != path:
            originals[alias] = present
            transport.TRANSPORT_ALIASES[alias] = path
            transport._transport_cache.pop(alias, None)


def transport_for(url: str | Sequence[str], *, store: str | None = None) -> str | None:
    """Return the name of this package's transport for a broker URL.

    Args:
        url: the broker URL, or a list of broker URLs. In a list, only the first URL counts.
        store: the URL of the database for waiting messages (``native_delay_store``), or None.
            Without this database, most of kombu's transports cannot delay messages.

    Returns:
        "rabbitmq", "redis", "sqs", "pgmq" or "sql"; None if the broker cannot delay messages.
    """
    if not isinstance(url, str) and not (isinstance(url, Sequence) and url):
        raise TypeError(f"expected a broker's URL, or a list of them, got {url!r}")
    first = url if isinstance(url, str) else url[0]
    scheme = first.partition("://")[0]
    return transport_of(scheme.partition("+")[0], store=store)


def transport_of(alias: object, *, store: str | None) -> str | None:
    path = ALIASES.get(alias) if isinstance(alias, str) else None
    if path is None or (needs_store(alias) and store is None):
        return None
    return path.partition(":")[0].rpartition(".")[2]


@contextmanager
def url_errors_explained() -> Iterator[None]:
    """In a ``with`` block, raise UnsupportedBroker for an unknown URL scheme or missing package."""
    try:
        yield
    except ModuleNotFoundError as exc:
        extra = _EXTRAS.get(str(exc.name))
        package = exc.name if extra is None else f"celery_native_delay[{extra}]"
        raise UnsupportedBroker(
            f"this broker needs the Python package {exc.name}, which is not installed: "
            f"pip install '{package}'"
        ) from None
    except KeyError as exc:
        if not str(exc.args[0]).startswith("No such transport"):
            raise
        raise UnsupportedBroker(
            f"expected a broker URL with a scheme that kombu knows: {exc.args[0]}"
        ) from None


def needs_store(alias: object) -> bool:
    """Return True if this kombu transport needs ``native_delay_store`` to delay messages."""
    return alias in _WITHOUT_DELAYS and alias not in _OWN_STORE


#: Settings that publishing does not need. Two of these settings may hold a password.
_NOT_FOR_PUBLISHING = (
    "management_url",
    "telemetry",
    "once",
    "rates",
    "keys",
)

#: Settings whose URLs may hold a password. The option must not show the password.
_URLS = ("store",)


def option_of(settings: DelaySettings | SettingsError) -> dict[str, Any] | bool:
    """Convert settings to a JSON value for the option ``native_delay``.

    Default settings become True. An error becomes ``{"misconfigured": <text of the error>}``.
    """
    if isinstance(settings, SettingsError):
        return {"misconfigured": str(settings)}
    defaults = DelaySettings()
    changed = {
        field.name: getattr(settings, field.name)
        for field in fields(settings)
        if field.name not in _NOT_FOR_PUBLISHING
        and getattr(settings, field.name) != getattr(defaults, field.name)
    }
    for name in _URLS:
        if name in changed:
            shown = without_password(changed[name])
            _whole_urls[shown] = changed[name]
            changed[name] = shown
    # The order of the fields is fixed, because kombu's pool key contains the repr of the option.
    return changed or True


#: The whole URL of each database, by the URL without its password.
_whole_urls: dict[str, str] = {}


def asks_for_delays(option: Any) -> bool:
    """Return True if this value of the transport option ``native_delay`` enables delays."""
    if option is None or option is False:
        return False
    enabled = option.get("enabled", True) if isinstance(option, Mapping) else True
    return enabled is not False and getattr(option, "enabled", True)


def settings_from_option(option: Any) -> DelaySettings:
    """Convert the transport option ``native_delay`` to a :class:`DelaySettings`.

    Args:
        option: True for the default settings, a :class:`DelaySettings`, or a dict. The keys of the
            dict are names of settings without the prefix ``native_delay_``.

    Raises:
        SettingsError: the option has a wrong type, or a setting has a wrong value.
    """
    match option:
        case True:
            return DelaySettings()
        case DelaySettings():
            return option
        case {"misconfigured": error}:
            raise SettingsError(error)
        case Mapping():
            whole = {
                name: _whole_urls.get(option[name], option[name])
                for name in _URLS
                if option.get(name)
            }
            return DelaySettings.from_mapping({**option, **whole})
    raise SettingsError(
        f'expected transport_options["native_delay"] to be True, a dict of settings or '
        f"DelaySettings, got {option!r}"
    )


#: The transport options that limit the time for an answer, by kombu's driver type.
_TIMEOUTS = {
    "amqp": ("read_timeout", "write_timeout"),
    "redis": ("socket_timeout", "socket_connect_timeout"),
    "pgmq": ("pool_timeout",),
}


def answer_limits(connection: Any) -> dict[str, Any]:
    """Return transport options that give a broker ``native_delay_store_timeout_seconds``.

    Without such options, kombu waits for ever for an answer of a Redis or RabbitMQ that hangs, and
    for minutes for an answer of SQS.
    """
    option = (connection.transport_options or {}).get(OPTION)
    seconds = settings_from_option(option or True).store_timeout_seconds
    driver = connection.get_transport_cls().driver_type
    if driver == "sqs":
        limits = {"connect_timeout": seconds, "read_timeout": seconds}
        return {"client-config": {**limits, "retries": {"total_max_attempts": 2}}}
    return dict.fromkeys(_TIMEOUTS.get(driver, ()), seconds)


def limited(connection: Any) -> Any:
    """Give a kombu connection :func:`answer_limits`, where its own options set none."""
    own = connection.transport_options or {}
    connection.transport_options = answer_limits(connection) | own
    return connection


def delay_headers(
    *,
    countdown: float | None = None,
    eta: datetime | str | None = None,
    now: datetime | None = None,
) -> dict[str, str]:
    """Return message headers with a due time, for messages that you publish with kombu.

    Args:
        countdown: the delay in seconds, counted from *now*. Give either *countdown* or *eta*.
        eta: the due time, a datetime or ISO 8601 text. A time without a time zone is in UTC.
        now: the current time; the default is the time of this machine's clock.

    Returns:
        ``{"eta": ISO 8601 text}``. Add this dict to the headers of the message.

    Raises:
        InvalidDueTime: the due time is invalid, *countdown* and *eta* are both given, or both are
            missing.
    """
    if (countdown is None) == (eta is None):
        raise InvalidDueTime(f"expected countdown or eta, got {countdown=} and {eta=}")
    if countdown is not None:
        if not isinstance(countdown, int | float):
            raise InvalidDueTime(f"expected a countdown in seconds, got {countdown!r}")
        check_countdown(countdown, longest_delay_seconds=LONGEST_COUNTDOWN_SECONDS)
        try:
            eta = (now or utc_now()) + timedelta(seconds=countdown)
        except OverflowError as exc:
            raise InvalidDueTime(f"expected a countdown in seconds, got {countdown!r}") from exc
    assert eta is not None
    due_us(eta)
    return {"eta": eta if isinstance(eta, str) else eta.isoformat()}

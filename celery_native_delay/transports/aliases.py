"""Our transports under kombu's own aliases.

kombu resolves a URL's scheme through ``TRANSPORT_ALIASES``; ours are subclasses that behave as
kombu's until a connection asks for more with ``transport_options["native_delay"]``. The option is
what makes delayed delivery per app; unlike a Connection subclass it survives pools, clones,
pickling and failover.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from datetime import UTC, datetime, timedelta
from typing import Any

from kombu import transport

from ..due_time import check_countdown, due_us
from ..errors import InvalidDueTime, SettingsError, UnsupportedBroker
from ..settings import DelaySettings
from ..urls import without_password

#: The key in a connection's ``transport_options``.
OPTION = "native_delay"

_RABBITMQ = "celery_native_delay.transports.rabbitmq"
_REDIS = "celery_native_delay.transports.redis"
_SQS = "celery_native_delay.transports.sqs"

_SQL = "celery_native_delay.transports.sql"
_PGMQ = "celery_native_delay.transports.pgmq"

#: kombu's transports on which nothing can wait: their messages do in ``native_delay_store``. Not
#: gcpubsub: a dispatcher must know the topic of a queue, which only the process that bound it does.
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

#: Those of them that are a database themselves.
_OWN_STORE = ("sqlalchemy", "sqla")

#: kombu's aliases and what they lead to from now on; modules are imported when first used.
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

#: Extras of this package, by the Python packages that they install.
_EXTRAS = {"redis": "redis", "botocore": "sqs", "sqlalchemy": "sql"}

#: What the aliases led to before.
originals: dict[str, Any] = {}


def register_transports() -> None:
    """Point kombu's aliases at our transports, as far as it has them. Idempotent."""
    for alias, path in ALIASES.items():
        present = transport.TRANSPORT_ALIASES.get(alias)
        if present is not None and present != path:
            originals[alias] = present
            transport.TRANSPORT_ALIASES[alias] = path
            transport._transport_cache.pop(alias, None)


def transport_for(url: str | Sequence[str], *, store: str | None = None) -> str | None:
    """The transport of ours that serves a broker: the one place where that is decided.

    Args:
        url: the broker's, as Celery takes it; of several the first.
        store: ``native_delay_store``, without which most of kombu's transports cannot delay.

    Returns:
        "rabbitmq", "redis", "sqs", "pgmq" or "sql", the name of its module; None if none does.
    """
    if not isinstance(url, str) and not (isinstance(url, Sequence) and url):
        raise TypeError(f"expected a broker's URL, or a list of them, got {url!r}")
    first = url if isinstance(url, str) else url[0]
    scheme = first.partition("://")[0]
    return transport_of(scheme.partition("+")[0], store=store)


def transport_of(alias: object, *, store: str | None) -> str | None:
    """The transport of ours for one of kombu's aliases; None for a foreign class."""
    path = ALIASES.get(alias) if isinstance(alias, str) else None
    if path is None or (needs_store(alias) and store is None):
        return None
    return path.partition(":")[0].rpartition(".")[2]


@contextmanager
def url_errors_explained() -> Iterator[None]:
    """Turn what kombu raises for an unknown URL scheme or a missing package into our error."""
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
    """True if messages can wait on this transport of kombu's only in a database beside it."""
    return alias in _WITHOUT_DELAYS and alias not in _OWN_STORE


_NOT_FOR_PUBLISHING = (
    "management_url",
    "telemetry",
    "fence_policy",
    "records_away",
    "strict",
    "rates",
)

#: Settings whose URLs may hold a password, which the option must not show.
_URLS = ("records", "store")


def option_of(settings: DelaySettings | SettingsError) -> dict[str, Any] | bool:
    """The value of :data:`OPTION` for *settings*.

    Plain data, because ``celery inspect stats`` shows transport options as JSON, and in a fixed
    order, because their repr is part of kombu's pool key. An error stands for settings that could
    not be understood: immediate messages go their way, the first delayed one is told.
    """
    if isinstance(settings, SettingsError):
        return {"misconfigured": str(settings)}
    defaults = DelaySettings()
    changed = {
        field.name: getattr(settings, field.name)
        for field in fields(settings)
        # Publishing does not need them, and two of them may hold a password.
        if field.name not in _NOT_FOR_PUBLISHING
        and getattr(settings, field.name) != getattr(defaults, field.name)
    }
    for name in _URLS:
        if name in changed:
            shown = without_password(changed[name])
            _whole_urls[shown] = changed[name]
            changed[name] = shown
    return changed or True


#: URLs of records and stores, by the same without its password.
_whole_urls: dict[str, str] = {}


def asks_for_delays(option: Any) -> bool:
    """True if a connection with this option is to be one of ours; an empty dict of settings is."""
    if option is None or option is False:
        return False
    enabled = option.get("enabled", True) if isinstance(option, Mapping) else True
    return enabled is not False and getattr(option, "enabled", True)


def settings_from_option(option: Any) -> DelaySettings:
    """Settings from ``transport_options["native_delay"]``.

    Args:
        option: True for the defaults, a mapping of settings without their prefix, or a
            :class:`DelaySettings`.

    Raises:
        SettingsError: it is none of these, or a setting is wrong.
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


def delay_headers(
    *,
    countdown: float | None = None,
    eta: datetime | str | None = None,
    now: datetime | None = None,
) -> dict[str, str]:
    """Headers with which a plain kombu ``publish`` is delayed.

    Args:
        countdown: seconds from *now*.
        eta: the due time; a naive one is UTC. Either *countdown* or *eta*.
        now: the current time; defaults to the clock's.

    Returns:
        ``{"eta": ISO 8601 text}``, to be merged into the message's own headers.

    Raises:
        InvalidDueTime: neither or both were given, or one is no point in time.
    """
    if (countdown is None) == (eta is None):
        raise InvalidDueTime(f"expected countdown or eta, got {countdown=} and {eta=}")
    if countdown is not None:
        if not isinstance(countdown, int | float):
            raise InvalidDueTime(f"expected a countdown in seconds, got {countdown!r}")
        check_countdown(countdown, longest_delay_seconds=LONGEST_COUNTDOWN_SECONDS)
        try:
            eta = (now or datetime.now(UTC)) + timedelta(seconds=countdown)
        except OverflowError as exc:
            raise InvalidDueTime(f"expected a countdown in seconds, got {countdown!r}") from exc
    assert eta is not None
    due_us(eta)
    return {"eta": eta if isinstance(eta, str) else eta.isoformat()}


#: A thousand years: what the levels can hold is checked when the message is published.
LONGEST_COUNTDOWN_SECONDS = 1000 * 365.25 * 86400

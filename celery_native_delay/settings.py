"""All settings of this package, in one frozen object.

In a Celery configuration every name has the prefix ``native_delay_``. In ``install()`` and in
``transport_options["native_delay"]`` the names have no prefix.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Any, Literal, TypedDict
from urllib.parse import urlsplit

from .errors import SettingsError
from .rates.declared import DeclaredKey
from .rates.rate import Rate
from .urls import (
    EXPECTED_TABLE_PREFIX,
    is_redis_url,
    is_table_prefix,
    table_prefix_of,
    without_password,
)

#: A quorum queue rounds the time when a message arrives down to milliseconds. Without this extra
#: time, a message could be due up to a millisecond too early: rabbit_fifo.erl, expire_msgs/4.
TTL_EXTRA_MS = 1

#: Bits in one group: a message waits in one of the group's 15 queues, instead of up to four queues.
FUSED_WIDTH = 4
#: The lowest group has three bits: the fractions of a second at the default resolution. The next
#: group then begins with whole seconds, and most delays use all of its 15 queues.
FRACTION_BITS = 3

#: Fields of :class:`DelaySettings` that are no settings of an app.
_LAYOUT = ("levels", "resolution", "fused_bits")

#: The value of ``native_delay_enabled`` for a rollback.
DRAIN: Literal["drain"] = "drain"

AnyRate = Rate | str | Mapping[str, Any]
Names = tuple[str, ...] | list[str] | set[str] | frozenset[str]
OnceNames = Names | Mapping[str, float] | tuple[tuple[str, float], ...]

_PREFIX = "native_delay_"

#: Days that a worker remembers a success of a task that is *once*.
ONCE_DAYS = 7.0

_NAMESPACE = re.compile(r"[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*")
_NAMESPACE_BYTES = 64


# SQLite in memory is refused, because no other process would see the database.
_STORE_URL = re.compile(
    r"(?!sqlite(\+\w+)?://(/?(\?|$)|.*(:memory:|mode=memory)))[A-Za-z][\w.]*(\+\w+)?://", re.ASCII
)
# SQLAlchemy's own dialects, and others with their driver; never the URL of a broker.
_DATABASE = re.compile(
    r"(?!sqla\+|sqlalchemy\+)(sqlite|postgresql|mysql|mariadb|oracle|mssql)://|\w+\+\w+://"
)

# The alias of one of Django's databases.
_DJANGO = re.compile(r"django(:[\w.-]+)?")

# The service is the name that Sentinel knows the primary by.
_SENTINEL = re.compile(r"sentinel://[^/]+/[^/?]+/\d+(\?credential_provider=[^&]+)?")

_EXPECTED_STORE = (
    "None, the URL of a Redis that starts with redis://, rediss:// or redis+socket://, or is "
    "sentinel://host:26379,host2:26379/service/0, or a "
    "SQLAlchemy URL of a database that outlives the process, such as "
    '"postgresql+psycopg://host/shop", or "django" or "django:alias" for a database of Django'
)

_EXPECTED_PREFIX = (
    f"the URL of a database whose native_delay_prefix has {EXPECTED_TABLE_PREFIX}; for "
    f'"django", set DELAY_TABLE_PREFIX in Django\'s settings'
)


@dataclass(frozen=True, kw_only=True)
class DelaySettings:
    """The settings of this package for one app.

    Raises:
        SettingsError: a name is unknown or a value is invalid. The error's text gives the invalid
            value, the valid values and the remedy.
    """

    enabled: bool | Literal["drain"] = True
    """If off, Celery behaves as if this package were not installed. "drain" is for a rollback:
    waiting tasks are delivered, listed and cancelled, and new tasks are delayed as by plain Celery.
    Default: True."""
    namespace: str = "celery_delay"
    """First word of the name of each queue, exchange and Redis key. Default: "celery_delay"."""
    # The layout of RabbitMQ's delay queues is the same in all apps. Only tests make a quicker one.
    levels: int = 31
    resolution: float = 0.125
    fused_bits: int = 15
    declare: bool = True
    """If off, workers and producers declare, bind and delete nothing on RabbitMQ, and raise
    ``NotDeclared`` if a queue or exchange is missing. Then run `celery -A PROJ delay declare` as a
    user with the rights. Default: True."""
    landing: tuple[str, ...] = ()
    """Names of exchanges to which consumers without this package bind queues, and of queues that
    may be full and then refuse messages. A due message for one of these goes to a queue of this
    package, which dead-letters the message there. A full queue then delays only its own tasks. A
    name with ``*``, for any characters, means only queues. Default: none."""
    management_url: str | None = None
    """URL of RabbitMQ's management API, ``http://user:password@host:15672``. Only ``doctor``,
    ``status`` and a worker's check of policies read this API. Default: None, which means the
    broker's host, user and password, and port 15672."""

    store: str | None = None
    """URL of a Redis, such as ``redis://host/1``, or SQLAlchemy URL of a database, such as
    ``postgresql+psycopg://host/shop``, in which tasks wait instead of in the broker. ``django`` is
    the default database of a Django project, ``django:other`` another one. With
    ``?native_delay_prefix=shop_delay_`` in the URL of a database, the names of its tables begin
    with ``shop_delay_``. Default: None. RabbitMQ, SQS and pgmq then delay tasks themselves; Redis
    and ``sqla+…`` brokers are their own store. With other brokers, tasks wait in the worker's
    memory, as in Celery."""
    store_tasks: tuple[str, ...] = ("*",)
    """Names of the tasks that wait in the store, with ``*`` for any text. Other tasks wait in the
    broker. Tasks with a key or a rate limit, and periodic tasks, always wait in the store.
    Default: ``("*",)``, all tasks."""
    once: OnceNames = ()
    """Names of the tasks that run a single time, with ``*`` for any text: a second delivery of the
    same task and retry is acknowledged and not run. Needs a store. A dict such as
    ``{"billing.*": 30, "*": 1}`` also says for how many days a success is remembered, by default
    7. The first name that fits counts. Default: none."""
    store_transactions: bool = True
    """A task in ``transaction.atomic`` is sent if, and only if, the transaction commits. Needs
    Django's database as the store. If off, the task is sent at once. Default: True."""
    store_timeout_seconds: float = 5.0
    """Seconds after which a producer or a command raises ``StoreUnavailable`` if the store does not
    answer. ``Delay(app)`` waits as long for each answer of a Redis or RabbitMQ broker, then raises
    ``OperationalError``; ``broker_transport_options`` may say otherwise. Default: 5."""

    telemetry: str | None = None
    """Folder for telemetry. Every process of a worker writes a line of JSON when a task starts, and
    one when it ends. Default: None, no telemetry."""
    rates: Mapping[str, AnyRate | Sequence[AnyRate]] | tuple[tuple[str, tuple[Rate, ...]], ...] = ()
    """Rate limits by task name, such as ``{"shop.call_api": Rate("100/m", key="tenant")}`` or
    ``{"shop.call_api": ["10/s", "5000/d"]}``. Tasks beyond a rate limit wait in the store.
    Default: none."""

    keys: Mapping[str, DeclaredKey] | tuple[tuple[str, DeclaredKey], ...] = ()
    """Keys by task name, such as ``{"shop.reindex": Debounce(key="user", seconds=5)}``, also
    ``Throttle`` and ``Unique``. ``apply_async`` then debounces, throttles or makes unique each call
    of the task. Default: none."""

    schedules: bool | int | str = False
    """If on, periodic tasks such as those of ``beat_schedule`` are delayed tasks, and no ``celery
    beat`` is needed. Needs a store beside RabbitMQ, SQS and pgmq. Instead of True, you can give the
    release of the app's ``beat_schedule``: a number, or a date such as ``"2026-11-23"``. If workers
    have different schedules, the highest release decides; of equal ones, the worker that started
    last. True is lower than any release. Default: False."""
    schedules_catch_up: Literal["one", "none", "all"] = "one"
    """How many missed runs of a periodic task happen late, after no worker ran for a while: "one",
    "none" or "all", at most 100. Default: "one"."""

    def __post_init__(self) -> None:
        for name in ("landing", "rates", "store_tasks", "once", "keys"):
            object.__setattr__(self, name, _normal(name, getattr(self, name)))
        for name in _names():
            _check(name, getattr(self, name))
        shared: dict[str | None, tuple[str, Rate]] = {}
        for task, its in self.rates_by_task.items():
            for rate in its:
                other, first = shared.setdefault(rate.name, (task, rate))
                if (rate is not first and other == task) or replace(first, key=rate.key) != rate:
                    raise SettingsError(
                        f"native_delay_rates: expected one rate named {rate.name!r} of each task, "
                        f"equal except for key, got {first!r} of {other} and {rate!r} of {task}"
                    )

    @property
    def drains(self) -> bool:
        """True if this app delivers its waiting tasks, and delays no new task."""
        return self.enabled == DRAIN

    @property
    def resolution_ms(self) -> int:
        return round(self.resolution * 1000)

    @property
    def rates_by_task(self) -> dict[str, tuple[Rate, ...]]:
        return dict(self.rates)  # type: ignore[arg-type]

    def waits_in_store(self, task: str) -> bool:
        """Return True if a task of this name waits in the store, or would with a store."""
        return any(fnmatchcase(task, pattern) for pattern in self.store_tasks)

    def is_once(self, task: str) -> bool:
        """Return True if the setting *once* names the task."""
        return self._days_of_once(task) is not None

    def once_days(self, task: str) -> float:
        """Return for how many days a success of a task of this name is remembered."""
        return self._days_of_once(task) or ONCE_DAYS

    def _days_of_once(self, task: str) -> float | None:
        pairs: Any = self.once
        return next((days for pattern, days in pairs if fnmatchcase(task, pattern)), None)

    def lands(self, queue: str) -> bool:
        """Return True if the setting *landing* names the queue."""
        return any(fnmatchcase(queue, pattern) for pattern in self.landing)

    @property
    def schedules_version(self) -> int | str | None:
        """The release of the app's ``beat_schedule``; None without one."""
        return None if isinstance(self.schedules, bool) else self.schedules

    @property
    def is_all_in_store(self) -> bool:
        """True if no task waits in the broker."""
        return self.store is not None and "*" in self.store_tasks

    @property
    def longest_delay_seconds(self) -> float:
        """The longest allowed delay in seconds: 8.5 years."""
        return ((1 << self.levels) - 1) * self.resolution_ms / 1000

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> DelaySettings:
        """Make settings from a dict of setting names (without ``native_delay_``) and values.

        Raises SettingsError if a name is unknown or a value is invalid.
        """
        for name, value in values.items():
            bare = name.removeprefix(_PREFIX)
            if bare != name and bare in _names():
                shown = repr(value) if isinstance(value, int | float) else "…"  # no password
                raise SettingsError(
                    f"expected settings without their prefix here, got {name}: write {bare}={shown}"
                )
            if name not in _names():
                close = get_close_matches(bare, setting_names(), n=1)
                known = ", ".join(f"{_PREFIX}{name}" for name in setting_names())
                hint = f"did you mean native_delay_{close[0]}?" if close else f"known: {known}"
                raise SettingsError(f"unknown setting native_delay_{bare}; {hint}")
        return cls(**values)


def tenants_of(settings: DelaySettings) -> dict[str, DeclaredKey]:
    """Return the key that names the tenant of each task: of its first rate with a key, or its own.

    The keys of the dict are the names of the tasks.
    """
    found = dict(settings.keys)
    for task, its in settings.rates_by_task.items():
        for rate in reversed(its):
            if rate.key is not None:
                found[task] = DeclaredKey(rate.key)
    return found


class InstallKeywords(TypedDict, total=False):
    """The settings for type checkers, as ``install()`` takes them: lists may be any collection."""

    enabled: bool | Literal["drain"]
    namespace: str
    declare: bool
    landing: Names
    management_url: str | None
    store: str | None
    store_tasks: Names
    once: OnceNames
    store_transactions: bool
    store_timeout_seconds: float
    telemetry: str | None
    rates: Mapping[str, AnyRate | Sequence[AnyRate]]
    keys: Mapping[str, DeclaredKey]
    schedules: bool | int | str
    schedules_catch_up: Literal["one", "none", "all"]


def setting_names() -> list[str]:
    """Return the names of all settings, without ``native_delay_``."""
    return [name for name in _names() if name not in _LAYOUT]


def _names() -> list[str]:
    return [field.name for field in fields(DelaySettings)]


def _normal(name: str, value: Any) -> Any:
    if name in ("landing", "store_tasks", "once") and isinstance(value, list | set | frozenset):
        value = tuple(value if isinstance(value, list) else sorted(value, key=str))
    if name == "once" and isinstance(value, Mapping):
        return tuple(value.items())
    if name == "once" and isinstance(value, tuple):
        return tuple((each, ONCE_DAYS) if isinstance(each, str) else each for each in value)
    if name == "rates" and isinstance(value, Mapping):
        try:
            return tuple((task, named(task, its)) for task, its in sorted(value.items(), key=str))
        except SettingsError as exc:
            raise SettingsError(f"native_delay_rates: {exc}") from exc
    if name == "keys" and isinstance(value, Mapping):
        return tuple(value.items())
    return value


def _check(name: str, value: Any) -> None:
    fits, expected = _rule(name, value)
    if fits:
        return
    if isinstance(value, str):
        value = without_password(value)
    raise SettingsError(f"expected native_delay_{name} to be {expected}, got {value!r}")


def _rule(name: str, value: Any) -> tuple[bool, str]:
    """Check a setting's value. Returns True or False, and a text that describes valid values."""
    is_text = isinstance(value, str) and value != ""
    match name:
        case "enabled":
            return isinstance(value, bool) or value == DRAIN, f'True, False or "{DRAIN}"'
        case "declare" | "store_transactions":
            return isinstance(value, bool), "True or False"
        case "namespace":
            fits = is_text and _NAMESPACE.fullmatch(value) and len(value) <= _NAMESPACE_BYTES
            return bool(fits), f"1 to {_NAMESPACE_BYTES} letters, digits, _, - or inner dots"
        case "levels" | "resolution" | "fused_bits":
            return True, ""
        case "store":
            has_prefix = is_text and table_prefix_of(value) is not None
            expected = _EXPECTED_PREFIX if has_prefix else _EXPECTED_STORE
            return value is None or is_store_url(value), expected
        case "once":
            fits = _by_task(value, lambda days: _is_number(days) and 0 < days <= 3660)
            return fits, (
                'a list of task names such as ["shop.remind", "billing.*"], or a dict of days '
                'above 0, and at most 3660, such as {"billing.*": 30}'
            )
        case "landing" | "store_tasks":
            fits = _are(str, value) and all(value)
            tasks = 'a list of task names such as ["shop.remind", "billing.*"]'
            return fits, "a list of exchange and queue names" if name == "landing" else tasks
        case "store_timeout_seconds":
            return _is_number(value) and 0 < value <= 3600, "seconds above 0, and at most 3600"
        case "telemetry":
            return value is None or (is_text and "\0" not in value), "None or the path of a folder"
        case "rates":
            fits = _by_task(value, lambda its: _are(Rate, its) and len(its) > 0)
            return fits, 'a dict of rates by task, such as {"shop.call_api": "100/m"}'
        case "keys":
            fits = _by_task(value, lambda key: isinstance(key, DeclaredKey))
            return fits, 'a dict such as {"shop.reindex": Debounce(key="user", seconds=5)}'
        case "schedules":
            fits = isinstance(value, bool) or is_text or (type(value) is int and value > 0)
            return fits, 'True, False, or a release: a number from 1, or "2026-11-23"'
        case "schedules_catch_up":
            return value in ("one", "none", "all"), '"one", "none" or "all"'
        case "management_url":
            return value is None or (is_text and value.startswith("http")), "None or an http(s) URL"
    raise AssertionError(f"{name} has no check")


def _are(kind: type, values: Any) -> bool:
    return isinstance(values, tuple) and all(isinstance(each, kind) for each in values)


def _by_task(value: Any, fits: Callable[[Any], bool]) -> bool:
    """Return True if *value* has pairs of a task's name and a value that *fits*."""
    return _are(tuple, value) and all(
        len(pair) == 2 and isinstance(pair[0], str) and pair[0] != "" and fits(pair[1])
        for pair in value
    )


def lowest_bit(bit: int, *, fused_bits: int) -> int:
    """Return the lowest bit of the group that contains *bit*; for example, 3 for bit 5.

    A delay is a binary number, in units of 125 ms. The bits form groups, and a message waits at
    most once per group. The lowest group has three bits (0-2). The next groups have four bits
    (3-6, 7-10, …), up to the bit *fused_bits* - 1. Each higher bit is a group of its own.
    """
    if bit >= fused_bits:
        return bit
    return max(0, bit - (bit - FRACTION_BITS) % FUSED_WIDTH)


def named(task: str, rates: Any) -> tuple[Rate, ...]:
    """Return the rate limits of a task; each limit without a name gets a name.

    For the task ``shop.pay``, the names are ``shop.pay``, ``shop.pay#2``, ``shop.pay#3``.
    """
    given = [Rate.of(each) for each in (rates if isinstance(rates, list | tuple) else [rates])]
    names = [task, *(f"{task}#{number}" for number in range(2, len(given) + 1))]
    return tuple(replace(rate, name=rate.name or names[at]) for at, rate in enumerate(given))


def is_store_url(value: Any) -> bool:
    """Return True if *value* is a valid ``native_delay_store``, apart from None."""
    if not isinstance(value, str):
        return False
    if _DJANGO.fullmatch(value):
        return True
    if value.startswith("sentinel://"):
        return bool(_SENTINEL.fullmatch(value))
    if value.startswith("sqla+"):  # the URL of a broker
        return False
    prefix = table_prefix_of(value)
    if prefix is not None and (is_redis_url(value) or not is_table_prefix(prefix)):
        return False
    try:
        urlsplit(value).port  # noqa: B018  raises for one that is no number
    except ValueError:
        return False
    return is_redis_url(value) or bool(_STORE_URL.match(value) and _DATABASE.match(value))


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)

"""The options of ``FanOut``, which are checked before a Spark job starts."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any, Required, TypedDict
from uuid import uuid4
from zoneinfo import ZoneInfo

from ..errors import InvalidFanOut, SettingsError
from ..rates.rate import Rate
from ..texts import is_text
from ..urls import without_password

#: The name of a column, or a ``pyspark.sql.Column``.
Columnar = Any

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


@dataclass(frozen=True, kw_only=True, eq=False)
class FanOutOptions:
    """The options of ``FanOut``: the task, its due time and arguments, limits, and so on.

    A column is given by its name or as a ``Column``. For one value in all rows, use ``lit(value)``.

    Raises:
        InvalidFanOut: an option has a wrong value; the message says how to correct it.
    """

    app: str
    """The import path of the Celery app for the executors, such as ``"pkg.mod:app"``."""
    task: str
    """The name of the task."""
    eta: Columnar | None = None
    """The column of due times. Texts and timestamps without a zone also need *eta_zone*."""
    countdown: Columnar | None = None
    """The column of delays in seconds, counted from the time *now*. Give *eta* or *countdown*."""
    eta_zone: Columnar | None = None
    """The time zone of due times without a zone: ``"Europe/Berlin"``, or a Column of zones."""
    args: Sequence[Columnar] = ()
    """The columns of the positional arguments."""
    kwargs: Sequence[str] | Mapping[str, Columnar] = ()
    """The columns of the keyword arguments, or a mapping from an argument's name to a column."""
    queue: Columnar | None = None
    """The column of queue names. A row without a queue name uses the app's routes."""
    priority: Columnar | None = None
    """The column of message priorities, 0 to 255; null means no priority."""
    expires: Columnar | None = None
    """The column of expiry times: timestamps, or seconds from the time *now*."""
    id_cols: Sequence[Columnar] = ()
    """The columns that identify a row. The task id is computed from the values of these columns,
    *run_id* and *task*. By default, arguments, due time and queue identify the row."""
    run_id: str = field(default_factory=lambda: uuid4().hex)
    """The name of this run. With the same *run_id*, the same row has the same task id."""
    smear: float = 0.0
    """The longest extra delay in seconds, which spreads tasks that are due at the same time. The
    extra delay of a task is computed from the task id."""
    rate: Rate | str | bool | None = None
    """A rate limit that spreads the due times: a Rate, ``"100/m"``, or True. True means the task's
    rate in the setting ``native_delay_rates``, which workers enforce."""
    max_rate: float | None = None
    """The largest number of tasks sent per second, over all connections; None is no limit."""
    connections: int = 4
    """The largest number of broker connections at a time. For one queue, two to four suffice."""
    past: str = "reject"
    """Rows with a due time before *now*: "reject" them, or "send" them as tasks that are due."""
    max_body_bytes: int = 128 * 1024
    """The largest size of a task's arguments as JSON, in bytes; larger rows are rejected."""
    check_task: bool = True
    """If True, the task must be registered in the app. Use False for a task of another app."""
    check_queue: bool = True
    """If True, every queue name must occur in the app's configuration."""
    once: bool | None = None
    """If True, workers run each task a single time, however often it is sent. By default True with
    a Redis broker or ``native_delay_store``, which True needs."""
    now: datetime = field(default_factory=lambda: datetime.now(UTC))
    """The time from which *countdown* counts: an aware datetime, the same on all executors."""

    def __post_init__(self) -> None:
        for name in ("args", "id_cols"):
            object.__setattr__(self, name, _column_list(name, getattr(self, name)))
        object.__setattr__(self, "kwargs", _keyword_columns(self.kwargs))
        object.__setattr__(self, "rate", _rate(self.rate))
        for name, (expected, fits) in _RULES.items():
            value = getattr(self, name)
            if not fits(value):
                shown = without_password(value) if isinstance(value, str) else value
                raise InvalidFanOut(f"expected {name} to be {expected}, got {shown!r}")
        if (self.eta is None) == (self.countdown is None):
            both = "both" if self.eta is not None else "neither"
            raise InvalidFanOut(f"expected either eta= or countdown= with a column, got {both}")
        if self.rate and self.smear:
            raise InvalidFanOut("expected either rate= or smear=, got both: each spreads by itself")
        if self.eta_zone is not None and self.eta is None:
            raise InvalidFanOut("expected eta_zone only with eta: a countdown has no zone")
        if isinstance(self.eta_zone, str):
            _check_zone(self.eta_zone)

    @property
    def now_us(self) -> int:
        return (self.now - EPOCH) // timedelta(microseconds=1)

    @property
    def smear_us(self) -> int:
        return round(self.smear * 1_000_000)

    @property
    def keywords(self) -> Mapping[str, Columnar]:
        assert isinstance(self.kwargs, Mapping)
        return self.kwargs


class FanOutKeywords(TypedDict, total=False):
    """The options for type checkers, as ``FanOut`` takes them."""

    app: Required[str]
    task: Required[str]
    eta: Columnar | None
    countdown: Columnar | None
    eta_zone: Columnar | None
    args: Sequence[Columnar]
    kwargs: Sequence[str] | Mapping[str, Columnar]
    queue: Columnar | None
    priority: Columnar | None
    expires: Columnar | None
    id_cols: Sequence[Columnar]
    run_id: str
    smear: float
    rate: Rate | str | bool | None
    max_rate: float | None
    connections: int
    past: str
    max_body_bytes: int
    check_task: bool
    check_queue: bool
    once: bool | None
    now: datetime


def _check_zone(name: str) -> None:
    try:
        ZoneInfo(name)
    except (ValueError, OSError, KeyError) as exc:
        raise InvalidFanOut(
            f"expected eta_zone to be a time zone such as 'Europe/Berlin', got {name!r}; "
            f"zones of a column are given as a Column: col({name!r})"
        ) from exc


def _rate(rate: Any) -> Rate | bool | None:
    if rate is None or isinstance(rate, bool | Rate):
        return rate or None
    try:
        return Rate.of(rate)
    except SettingsError as exc:
        raise InvalidFanOut(f"rate: {exc}; or True for that of native_delay_rates") from exc


def _column_list(name: str, columns: Any) -> tuple[Columnar, ...]:
    if isinstance(columns, str) or not isinstance(columns, Sequence):
        raise InvalidFanOut(f"expected {name} to be a list of columns, got {columns!r}")
    return tuple(columns)


def _keyword_columns(columns: Any) -> dict[str, Columnar]:
    if isinstance(columns, Mapping):
        named = dict(columns)
    else:
        columns = _column_list("kwargs", columns)
        named = {column: column for column in columns if isinstance(column, str)}
        if len(named) != len(columns):
            raise InvalidFanOut(
                "expected kwargs to be a list of different column names; for others use a "
                "mapping: kwargs={'order_id': col('id')}"
            )
    for argument in named:
        if not isinstance(argument, str) or not argument.isidentifier():
            raise InvalidFanOut(
                f"expected kwargs to name arguments, got {argument!r}: use a mapping from "
                f"argument to column, kwargs={{'order_id': ...}}"
            )
    return named


def _is_flag(value: object) -> bool:
    return isinstance(value, bool)


def _matches(pattern: str) -> Callable[[object], bool]:
    return lambda value: is_text(value) and re.fullmatch(pattern, value) is not None


def _number(at_least: float) -> Callable[[object], bool]:
    def fits(value: Any) -> bool:
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        return is_number and at_least <= value < math.inf

    return fits


def _whole(low: int, high: int) -> Callable[[object], bool]:
    return lambda value: type(value) is int and low <= value <= high


#: The rule of each option: its description for the error message, and a function that tests it.
_RULES: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "app": ('an import path such as "pkg.mod:app"', _matches(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")),
    "task": ("the name of a task", _matches(r"\S(.*\S)?")),
    "run_id": ("a text that names this run", _matches(r"\S(.*\S)?")),
    "smear": ("a number of seconds from 0", _number(0)),
    "max_rate": ("tasks per second above 0, or None", lambda n: n is None or _number(1e-3)(n)),
    "connections": ("a whole number from 1 to 1000", _whole(1, 1000)),
    "past": ('"reject" or "send"', ("reject", "send").__contains__),
    "max_body_bytes": ("bytes from 1", _whole(1, 1 << 31)),
    **dict.fromkeys(("check_task", "check_queue"), ("True or False", _is_flag)),
    "once": ("True, False or None", lambda value: value is None or _is_flag(value)),
    "now": ("an aware datetime", lambda now: isinstance(now, datetime) and now.tzinfo is not None),
}

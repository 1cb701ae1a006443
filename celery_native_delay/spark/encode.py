"""Encode DataFrame rows as Celery tasks: task ids, due times and message bodies.

Executors encode the rows in Python. Due times are microseconds since the epoch, so the time zones
of the Spark session and the executors do not matter.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime, timedelta
from enum import Enum
from typing import Any, TypeAlias
from zoneinfo import ZoneInfo

import numpy as np
import pyarrow as pa
from pyspark.errors import AnalysisException
from pyspark.sql import functions as f
from pyspark.sql import types as t

from ..durations import duration
from ..rates.rate import LONGEST_KEY
from .ids import counted, id_of, key_text, smear_us_of
from .options import EPOCH, FanOutOptions
from .slots import Slot, check_type, column_text, no_such_column, slots
from .spreading import Spread

#: The columns of an encoded row, in this order.
SENT_COLUMNS = ("task_id", "due_us", "body", "queue", "priority", "expires_us", "error")

#: 300 years: longer than any delay, and far from overflowing 64 bits in microseconds.
_ENDLESS_SECONDS = 10**10
_ENDLESS_US = _ENDLESS_SECONDS * 1_000_000

_MICROSECOND = timedelta(microseconds=1)

#: Called with the number of accepted rows of a partition, and some of their due times in order.
Tell: TypeAlias = Callable[[int, Sequence[int]], object]

#: About how many due times stand for those of all rows of a partition.
_TOLD = 20

_DUE = SENT_COLUMNS.index("due_us")

_LONGS = ("due_us", "priority", "expires_us")
_ENCODED = (*SENT_COLUMNS, "line")
_ARROW_TYPES = [pa.int64() if name in _LONGS else pa.string() for name in _ENCODED]


def inputs(df: Any, options: FanOutOptions) -> tuple[Any, dict[str, t.DataType]]:
    """Select the columns that ``FanOut`` reads; return a DataFrame and the columns' types.

    Raises:
        InvalidFanOut: a column does not exist or has the wrong type.
    """
    read = list(slots(options))
    for slot in read:
        _check_exists(df, slot)
    chosen = [f.col(s.column) if isinstance(s.column, str) else s.column for s in read]
    frame = df.select(
        f.struct("*").alias("row"), *(c.alias(s.name) for c, s in zip(chosen, read, strict=True))
    )
    types = {field.name: field.dataType for field in frame.schema.fields}
    for slot in read:
        check_type(slot, types[slot.name], has_zone=options.eta_zone is not None)
    return frame, types


def encoded(
    df: Any,
    options: FanOutOptions,
    *,
    longest_seconds: float,
    spread: Spread | None = None,
    keep: Sequence[str] = (),
    tell: Tell | None = None,
) -> Any:
    """Return a DataFrame with one encoded task per row, in the columns ``SENT_COLUMNS``.

    First come the columns of *df* named in *keep*. If a row is rejected, the column ``error`` has
    the reason, else null. A row with a delay above *longest_seconds* is rejected. If *spread* is
    given, due times move later, to obey a rate limit. *tell* is called at the end of a partition.
    """
    frame, types = inputs(df, options)
    encoder = Encoder(options, types, longest_seconds=longest_seconds)
    schema = t.StructType([t.StructField(name, types[name]) for name in keep])
    for name in _ENCODED:
        schema.add(name, t.LongType() if name in _LONGS else t.StringType())
    key = None if spread is None else spread.column
    is_final = spread is None
    encode = _batch_encoder(encoder, options.run_id, keep, key, tell, is_final=is_final)
    kept = [f.col(name).alias(f"kept_{name}") for name in keep]  # another column may be so named
    result = frame.select(*kept, *encoder.slot_names).mapInArrow(encode, schema)
    if spread is not None:
        too_late = f.when(f.col("due_us") > encoder.latest_us, encoder.too_far).when(
            f.col("expires_us") <= f.col("due_us"), encoder.expired
        )
        result = spread.over(result, options.now_us)
        result = result.withColumn("error", f.coalesce("error", too_late))
    return result.select(*keep, *SENT_COLUMNS)


class Encoder:
    """Encodes rows as tasks: one tuple with the values of ``SENT_COLUMNS`` per row."""

    no_time = "no due time, or none that can be read"
    past = "the due time has passed"
    priority = "the priority is not in 0 to 255"
    no_queue = "the queue has no name"
    unknown_queue = "the queue is not one that the app's configuration names"
    expired = "it expires before it is due"

    def __init__(
        self,
        options: FanOutOptions,
        types: dict[str, t.DataType],
        *,
        longest_seconds: float,
        queues: tuple[str, ...] | None = None,
    ) -> None:
        """Set the columns' Spark *types*, and the allowed *queues*; None allows every queue."""
        read = list(slots(options))
        self.slot_names = [slot.name for slot in read]
        self.latest_us = options.now_us + int(longest_seconds * 1_000_000)
        self.too_far = f"the due time is beyond the longest delay of {duration(longest_seconds)}"
        self.too_large = f"the arguments take more than {options.max_body_bytes:,} bytes"
        self._kinds = [types[name] for name in self.slot_names]
        self._conversions = [_CONVERSIONS.get(slot.role) for slot in read]
        self._labels = [f"{slot.label} ({column_text(slot.column)})" for slot in read]
        self._task, self._now_us, self._smear_us = options.task, options.now_us, options.smear_us
        self._max_body_bytes = options.max_body_bytes
        self._rejects_past = options.past == "reject"
        self._counts_down = options.countdown is not None
        self._zone = options.eta_zone if isinstance(options.eta_zone, str) else None
        self._queues = queues
        args = ",".join("%s" for _ in options.args)
        kwargs = ",".join(f'"{name}":%s' for name in options.keywords)
        self._body = f"[[{args}],{{{kwargs}}}]"
        at = {name: place for place, name in enumerate(self.slot_names)}
        # A row's values begin with due time, zone (if it is a column), arguments and key.
        start = 2 if "zone" in at else 1
        end = start + len(options.args) + len(options.keywords)
        self._arguments, self._key = slice(start, end), slice(end, end + len(options.id_cols))
        # If an option is not set, its value is read after the last column, where zip() adds None.
        self._queue, self._priority, self._expires = (
            at.get(name, len(at)) for name in ("queue", "priority", "expires")
        )

    def rows(self, columns: Sequence[Any], run_id: str) -> Iterator[tuple[Any, ...]]:
        """Yield one tuple per row, with the values of ``SENT_COLUMNS``.

        The last value is the reason why the row is rejected, or None for an accepted row.
        """
        parts = counted(run_id) + counted(self._task)
        lists = [_values(column, kind) for column, kind in zip(columns, self._kinds, strict=True)]
        for place, convert in enumerate(self._conversions):
            if convert is not None:
                lists[place] = [v if v is _Fault.NO_TEXT else convert(v) for v in lists[place]]
        for values in zip(*lists, [None] * len(lists[0]), strict=True):
            try:
                yield self._row(values, parts)
            except _Rejected as exc:
                yield None, None, None, None, None, None, str(exc)

    def texts(self, columns: Sequence[Any], name: str) -> list[str | None]:
        """Return the column *name* as short texts; null and invalid UTF-8 become None."""
        place = self.slot_names.index(name)
        values = _values(columns[place], self._kinds[place])
        return [None if one in (None, _Fault.NO_TEXT) else str(one)[:LONGEST_KEY] for one in values]

    # --- private -------------------------------------------------------------------------

    def _row(self, values: tuple[Any, ...], parts: str) -> tuple[Any, ...]:
        if not _FAULTS.isdisjoint(values):
            place = next(place for place, value in enumerate(values) if value in _FAULTS)
            raise _Rejected(f"{self._labels[place]} {values[place].value}")
        raw_us = self._due_us(values)
        if self._rejects_past and raw_us < self._now_us:
            raise _Rejected(self.past)
        body = self._body % values[self._arguments]
        queue, priority = values[self._queue], values[self._priority]
        key = values[self._key]
        if not key:
            # A countdown counts in seconds, so that the same row has the same id at another time.
            key = body, str(raw_us - self._now_us if self._counts_down else raw_us), queue or ""
        task_id = id_of(parts + "".join(map(counted, key)))
        due_us = raw_us + smear_us_of(task_id, self._smear_us)
        if due_us > self.latest_us:
            raise _Rejected(self.too_far)
        if len(body.encode()) > self._max_body_bytes:
            raise _Rejected(self.too_large)
        if priority is not None and not 0 <= priority <= 255:
            raise _Rejected(self.priority)
        if queue == "":
            raise _Rejected(self.no_queue)
        if queue is not None and self._queues is not None and queue not in self._queues:
            raise _Rejected(self.unknown_queue)
        expires = values[self._expires]
        if expires is not None:
            if not isinstance(self._kinds[self._expires], t.TimestampType):
                expires = self._after_us(expires)
            if expires <= due_us:
                raise _Rejected(self.expired)
        return task_id, due_us, body, queue, priority, expires, None

    def _due_us(self, values: tuple[Any, ...]) -> int:
        due: Any = values[0]
        if due is None:
            raise _Rejected(self.no_time)
        if self._counts_down:
            return self._after_us(due)
        if not isinstance(self._kinds[0], t.TimestampType):
            try:
                at = datetime.fromisoformat(due.strip()) if isinstance(due, str) else _naive(due)
                if at.tzinfo is None:
                    at = at.replace(tzinfo=ZoneInfo(self._zone or values[1]))
            except (ValueError, TypeError, KeyError, OSError, OverflowError) as exc:
                raise _Rejected(self.no_time) from exc
            due = (at - EPOCH) // _MICROSECOND
        return max(int(due), self._now_us - _ENDLESS_US)

    def _after_us(self, seconds: Any) -> int:
        within = max(min(seconds, _ENDLESS_SECONDS), -_ENDLESS_SECONDS)
        us: int = round(within * 1_000_000)
        return self._now_us + us


class _Rejected(Exception):
    """Raised for a row that cannot become a task; the message is the reason."""


class _Fault(Enum):
    """Replaces a value that cannot be encoded; the row is then rejected."""

    NO_TEXT = "is not valid UTF-8"  # Spark does not check text
    NOT_FINITE = "is NaN or infinite"
    NULL = "is null"


_FAULTS = frozenset(_Fault)

_encode_json = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode


def _json_text(value: Any) -> str | _Fault:
    # Most values have one of these types. For one value, the JSON encoder takes four times as long.
    if value is None:
        return "null"
    if type(value) is int:
        return str(value)
    if type(value) is float:
        return repr(value) if math.isfinite(value) else _Fault.NOT_FINITE
    try:
        return _encode_json(value)
    except ValueError:
        return _Fault.NOT_FINITE


def _key_part(value: Any) -> str | _Fault:
    return _Fault.NULL if value is None else key_text(value)


def _finite(value: Any) -> Any:
    is_finite = not isinstance(value, float) or math.isfinite(value)
    return value if is_finite else _Fault.NOT_FINITE


#: Functions that convert a column's values, by the column's role. Other roles need no conversion.
_CONVERSIONS = {"json": _json_text, "key": _key_part, "countdown": _finite, "expires": _finite}


def _naive(us: int) -> datetime:
    return EPOCH.replace(tzinfo=None) + timedelta(microseconds=us)


def _values(column: Any, kind: t.DataType) -> list[Any]:
    """Return the values of an Arrow *column*; timestamps become microseconds since the epoch."""
    if isinstance(kind, t.TimestampType | t.TimestampNTZType):
        column = column.cast(pa.int64())
    try:
        values = column.to_pylist()
    except UnicodeDecodeError:
        values = [_value(one) for one in column]
    if isinstance(kind, t.ArrayType | t.MapType | t.StructType | t.FloatType):
        return [one if one is _Fault.NO_TEXT else _plain(one, kind) for one in values]
    return values  # type: ignore[no-any-return]


def _value(scalar: Any) -> Any:
    try:
        return scalar.as_py()
    except UnicodeDecodeError:
        return _Fault.NO_TEXT


def _plain(value: Any, kind: Any) -> Any:
    """Convert a Spark value for JSON: a map becomes a dict, a 32-bit float a short decimal."""
    match kind:
        case _ if value is None:
            return None
        case t.ArrayType():
            return [_plain(one, kind.elementType) for one in value]
        case t.MapType():
            return {key: _plain(one, kind.valueType) for key, one in value}
        case t.StructType():
            return {field.name: _plain(value[field.name], field.dataType) for field in kind.fields}
        case t.FloatType():
            return float(str(np.float32(value)))
    return value


def _batch_encoder(
    encoder: Encoder,
    run_id: str,
    keep: Sequence[str],
    key: str | None,
    tell: Tell | None,
    *,
    is_final: bool,
) -> Callable[[Iterator[Any]], Iterator[Any]]:
    """Return a mapInArrow() function that encodes rows and copies the columns *keep* and *key*."""
    kept = len(keep)

    def encode(batches: Iterator[Any]) -> Iterator[Any]:
        count, some_us = 0, []
        for batch in batches:
            columns = batch.columns[kept:]
            made = [*zip(*encoder.rows(columns, run_id), strict=True)] or [()] * len(SENT_COLUMNS)
            line = [None] * len(made[0]) if key is None else encoder.texts(columns, key)
            typed = zip((*made, line), _ARROW_TYPES, strict=True)
            arrays = [pa.array(one, kind) for one, kind in typed]
            whole = [*batch.columns[:kept], *arrays]
            yield pa.RecordBatch.from_arrays(whole, names=[*keep, *_ENCODED])
            due_us = [one for one in made[_DUE] if one is not None]
            count += len(due_us)
            some_us += _spaced(due_us) if is_final else []  # else a rate still moves them
        if tell is not None and count:
            tell(count, _spaced(some_us))

    return encode


def _spaced(times_us: list[int]) -> list[int]:
    return sorted(times_us)[:: len(times_us) // _TOLD + 1]


def _check_exists(df: Any, slot: Slot) -> None:
    """Raise InvalidFanOut if the column does not exist, or if several columns match."""
    name = slot.column
    alike = [one for one in df.columns if isinstance(name, str) and one.lower() == name.lower()]
    if alike == [name] and "." not in alike[0]:
        return
    try:
        if isinstance(name, str) and "." not in name and (not alike or alike.count(name) > 1):
            raise AnalysisException("none, or several")  # Spark 4 would log a page about it
        df.select(name).schema  # noqa: B018  Spark Connect looks at it now
    except AnalysisException as exc:
        raise no_such_column(slot, df.columns) from exc

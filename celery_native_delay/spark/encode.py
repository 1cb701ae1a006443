"""Ids, due times and bodies: what a row becomes on its way to the broker.

Executors do this in Python, for ``FanOut`` and the sink alike. Due times are microseconds since the
epoch, so that nothing depends on the time zone of a session or an executor.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime, timedelta
from typing import Any
from zoneinfo import ZoneInfo

import numpy as np
import pyarrow as pa
from pyspark.errors import AnalysisException
from pyspark.sql import functions as f
from pyspark.sql import types as t

from ..durations import duration
from ..rates.rate import LONGEST_KEY
from .ids import id_of_texts, key_text, smear_us_of
from .options import EPOCH, FanOutOptions
from .slots import Slot, check_type, column_text, no_such_column, slots
from .spreading import Spread

#: The columns of an encoded row that are sent, in this order.
SENT_COLUMNS = ("task_id", "due_us", "body", "queue", "priority", "expires_us", "error")

#: Microseconds that are certainly beyond every limit, and far from overflowing: 300 years.
_ENDLESS_US = 10**16

_MICROSECOND = timedelta(microseconds=1)

_LONGS = ("due_us", "priority", "expires_us")
_ENCODED = (*SENT_COLUMNS, "line")
_ARROW_TYPES = [pa.int64() if name in _LONGS else pa.string() for name in _ENCODED]

#: The value of text that is no UTF-8. Spark passes such bytes on; JSON cannot carry them.
_NOT_TEXT = object()


def inputs(df: Any, options: FanOutOptions) -> tuple[Any, dict[str, t.DataType]]:
    """*df* as its rows (``row``) beside the columns that are read, and the types of these.

    Raises:
        InvalidFanOut: there is no such column, or its type does not fit.
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
) -> Any:
    """*df* as ``SENT_COLUMNS``; *error* is null in rows that can be sent.

    Args:
        df: a DataFrame.
        options: what to make of it.
        longest_seconds: the longest delay that the app's levels hold.
        spread: how due times are spread, if they are.
        keep: columns of :func:`inputs` to keep in front.
    """
    frame, types = inputs(df, options)
    encoder = Encoder(options, types, longest_seconds=longest_seconds)
    schema = t.StructType([t.StructField(name, types[name]) for name in keep])
    for name in _ENCODED:
        schema.add(name, t.LongType() if name in _LONGS else t.StringType())
    key = None if spread is None else spread.column
    encode = _batch_encoder(encoder, options.run_id, keep, key)
    kept = [f.col(name).alias(f"kept_{name}") for name in keep]  # no name may be there twice
    result = frame.select(*kept, *encoder.slot_names).mapInArrow(encode, schema)
    if spread is not None:
        too_late = f.when(f.col("due_us") > encoder.latest_us, encoder.too_far).when(
            f.col("expires_us") <= f.col("due_us"), encoder.expired
        )
        result = spread.over(result, options.now_us)
        result = result.withColumn("error", f.coalesce("error", too_late))
    return result.select(*keep, *SENT_COLUMNS)


class Encoder:
    """An encoder of rows, given as Arrow columns, as tuples of ``SENT_COLUMNS``.

    It travels to executors, and therefore keeps nothing of *options* that is a ``Column``.
    """

    no_time = "no due time, or none that can be read"
    no_number = "the countdown is NaN or infinite"
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
        """Prepare for slots of *types*; *queues* are those that there are, None: any."""
        read = list(slots(options))
        self.slot_names = [slot.name for slot in read]
        self.latest_us = options.now_us + int(longest_seconds * 1_000_000)
        self.too_far = f"the due time is beyond the longest delay of {duration(longest_seconds)}"
        self.too_large = f"the arguments take more than {options.max_body_bytes:,} bytes"
        self._kinds = [types[name] for name in self.slot_names]
        self._labels = [f"{slot.label} ({column_text(slot.column)})" for slot in read]
        self._task, self._now_us, self._smear_us = options.task, options.now_us, options.smear_us
        self._max_body_bytes = options.max_body_bytes
        self._rejects_past = options.past == "reject"
        self._counts_down = options.countdown is not None
        self._zone = options.eta_zone if isinstance(options.eta_zone, str) else None
        self._queues = queues
        at = {name: place for place, name in enumerate(self.slot_names)}
        self._args = [at[f"arg{number}"] for number in range(len(options.args))]
        self._kwargs = {name: at[f"kwarg{n}"] for n, name in enumerate(options.keywords)}
        self._keys = [at[f"key{number}"] for number in range(len(options.id_cols))]
        # Of slots that there are not, the place behind the last value, where None is.
        self._zones, self._queue, self._priority, self._expires = (
            at.get(name, len(at)) for name in ("zone", "queue", "priority", "expires")
        )

    def rows(self, columns: Sequence[Any], run_id: str) -> Iterator[tuple[Any, ...]]:
        """The values that are sent for each row; in the last place the reason if it is not."""
        lists = [_values(column, kind) for column, kind in zip(columns, self._kinds, strict=True)]
        for values in zip(*lists, strict=True):
            try:
                yield self._row((*values, None), run_id)
            except _Rejected as exc:
                yield None, None, None, None, None, None, str(exc)

    def texts(self, column: Any, name: str) -> list[str | None]:
        """Texts of the slot *name* as keys of a rate: those that workers make of the argument."""
        values = _values(column, self._kinds[self.slot_names.index(name)])
        return [None if one in (None, _NOT_TEXT) else str(one)[:LONGEST_KEY] for one in values]

    # --- private -------------------------------------------------------------------------

    def _row(self, values: Sequence[Any], run_id: str) -> tuple[Any, ...]:
        if _NOT_TEXT in values:
            raise _Rejected(f"{self._labels[values.index(_NOT_TEXT)]} is not valid UTF-8")
        for place in self._keys:
            if values[place] is None:
                raise _Rejected(f"{self._labels[place]} is null")
        raw_us = self._due_us(values)
        if self._rejects_past and raw_us < self._now_us:
            raise _Rejected(self.past)
        body = self._body(values)
        queue, priority = values[self._queue], values[self._priority]
        expires_us = self._expires_us(values)
        if self._keys:
            key = [key_text(values[place]) for place in self._keys]
        else:  # a countdown as given: another time to count from is no other task
            since_us = self._now_us if self._counts_down else 0
            key = [body, str(raw_us - since_us), queue or ""]
        task_id = id_of_texts(run_id, self._task, *key)
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
        if expires_us is not None and expires_us <= due_us:
            raise _Rejected(self.expired)
        return task_id, due_us, body, queue, priority, expires_us, None

    def _due_us(self, values: Sequence[Any]) -> int:
        due: Any = values[0]
        if due is None:
            raise _Rejected(self.no_time)
        if self._counts_down:
            if not math.isfinite(due):
                raise _Rejected(self.no_number)
            return self._after_us(due)
        if not isinstance(self._kinds[0], t.TimestampType):
            try:
                at = datetime.fromisoformat(due.strip()) if isinstance(due, str) else _naive(due)
                if at.tzinfo is None:
                    at = at.replace(tzinfo=ZoneInfo(self._zone or values[self._zones]))
            except (ValueError, TypeError, KeyError, OSError, OverflowError) as exc:
                raise _Rejected(self.no_time) from exc
            due = (at - EPOCH) // _MICROSECOND
        return max(int(due), self._now_us - _ENDLESS_US)

    def _expires_us(self, values: Sequence[Any]) -> int | None:
        expires = values[self._expires]
        if expires is None:
            return None
        if isinstance(self._kinds[self._expires], t.TimestampType):
            return int(expires)
        if math.isnan(expires):
            raise _Rejected(f"{self._labels[self._expires]} is NaN")
        return self._after_us(expires)

    def _after_us(self, seconds: Any) -> int:
        """Microseconds since the epoch, *seconds* after *now*."""
        within = max(min(float(seconds), _ENDLESS_US / 1e6), -_ENDLESS_US / 1e6)
        return self._now_us + round(within * 1_000_000)

    def _body(self, values: Sequence[Any]) -> str:
        """``[args, kwargs]`` as JSON text."""
        args = [values[place] for place in self._args]
        kwargs = {name: values[place] for name, place in self._kwargs.items()}
        try:
            return _json([args, kwargs])
        except ValueError as exc:
            wrong = next(p for p in (*self._args, *self._kwargs.values()) if not _fits(values[p]))
            raise _Rejected(f"{self._labels[wrong]} is NaN or infinite") from exc


class _Rejected(Exception):
    """A row that cannot be sent, and why."""


_json = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode


def _fits(value: Any) -> bool:
    try:
        _json(value)
    except ValueError:
        return False
    return True


def _naive(us: int) -> datetime:
    return EPOCH.replace(tzinfo=None) + timedelta(microseconds=us)


def _values(column: Any, kind: t.DataType) -> list[Any]:
    """Python's values of an Arrow *column*; times as microseconds since the epoch."""
    if isinstance(kind, t.TimestampType | t.TimestampNTZType):
        column = column.cast(pa.int64())
    try:
        values = column.to_pylist()
    except UnicodeDecodeError:
        values = [_value(one) for one in column]
    if isinstance(kind, t.ArrayType | t.MapType | t.StructType | t.FloatType):
        return [one if one is _NOT_TEXT else _plain(one, kind) for one in values]
    return values  # type: ignore[no-any-return]


def _value(scalar: Any) -> Any:
    try:
        return scalar.as_py()
    except UnicodeDecodeError:
        return _NOT_TEXT


def _plain(value: Any, kind: Any) -> Any:
    """Maps as dicts, which Arrow has as lists of pairs, and floats as short as they are."""
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
    encoder: Encoder, run_id: str, keep: Sequence[str], key: str | None
) -> Callable[[Iterator[Any]], Iterator[Any]]:
    """A function for mapInArrow() that encodes all but the first columns, those to *keep*."""
    kept = len(keep)

    def encode(batches: Iterator[Any]) -> Iterator[Any]:
        for batch in batches:
            columns = batch.columns[kept:]
            rows = list(encoder.rows(columns, run_id))
            lines: list[str | None] = [None] * len(rows)
            if key is not None:
                lines = encoder.texts(columns[encoder.slot_names.index(key)], key)
            made = [*zip(*rows, strict=True)] or [()] * len(SENT_COLUMNS)
            typed = zip((*made, lines), _ARROW_TYPES, strict=True)
            arrays = [pa.array(one, kind) for one, kind in typed]
            whole = [*batch.columns[:kept], *arrays]
            yield pa.RecordBatch.from_arrays(whole, names=[*keep, *_ENCODED])

    return encode


def _check_exists(df: Any, slot: Slot) -> None:
    """Refuse the column of *slot* if there is none of its name, or more than one."""
    name = slot.column
    alike = [one for one in df.columns if isinstance(name, str) and one.lower() == name.lower()]
    if alike == [name]:
        return
    try:
        if isinstance(name, str) and "." not in name and (not alike or alike.count(name) > 1):
            raise AnalysisException("none, or several")  # Spark 4 would log a page about it
        df.select(name).schema  # noqa: B018  Spark Connect looks at it now
    except AnalysisException as exc:
        raise no_such_column(slot, df.columns) from exc

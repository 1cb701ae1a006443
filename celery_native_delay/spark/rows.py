"""Ids, due times and bodies of single rows, where no SQL can be used: what ``encode`` does.

A sink of Spark's is handed rows. Ids, due times, arguments and reasons are those of ``FanOut``
with the same options; a test compares them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from datetime import date, datetime, timedelta
from typing import Any
from zoneinfo import ZoneInfo

from pyspark.sql import types as t

from ..errors import InvalidFanOut
from .ids import id_of_texts, key_text, smear_us_of
from .options import EPOCH, FanOutOptions
from .reasons import Reasons
from .slots import check_type, slots

_MICROSECOND = timedelta(microseconds=1)


class RowEncoder:
    """An encoder of rows of *schema* as tuples of ``sending.SENT_COLUMNS``.

    Raises:
        InvalidFanOut: *schema* lacks a column, or has one whose type does not fit.
    """

    def __init__(
        self,
        schema: t.StructType,
        options: FanOutOptions,
        *,
        longest_seconds: float,
        queues: tuple[str, ...] | None,
    ) -> None:
        """Prepare for *schema*; *queues* are those that there are, None: any."""
        self.options = options
        self._queues = queues
        self._reasons = Reasons(options, longest_seconds)
        self._slots = list(slots(options))
        fields = {field.name.lower(): index for index, field in enumerate(schema.fields)}
        for slot in self._slots:
            if slot.column.lower() not in fields:
                raise InvalidFanOut(
                    f"expected {slot.label} to be a column of this DataFrame "
                    f"({', '.join(schema.names)}), got {slot.column!r}"
                )
        self._positions = [fields[slot.column.lower()] for slot in self._slots]
        kinds = [schema.fields[position].dataType for position in self._positions]
        for slot, kind in zip(self._slots, kinds, strict=True):
            check_type(slot, kind, has_zone=options.eta_zone is not None)
        self._types = {slot.name: kind for slot, kind in zip(self._slots, kinds, strict=True)}
        self._keys = [slot for slot in self._slots if slot.role == "key"]
        self._json = [slot for slot in self._slots if slot.role == "json"]

    def encode(self, row: Any, run_id: str) -> tuple[Any, ...]:
        """The values that are sent for *row*; in the last place the reason if it is not."""
        options, reasons = self.options, self._reasons
        values = {
            slot.name: _plain(row[position])
            for slot, position in zip(self._slots, self._positions, strict=True)
        }
        for slot in self._keys:
            if values[slot.name] is None:
                return _rejected(reasons.null(slot))
        raw_us = self._due_us(values["due_in"])
        if isinstance(raw_us, str):
            return _rejected(raw_us)
        if options.past == "reject" and raw_us < options.now_us:
            return _rejected(reasons.past)
        body = self._body(values)
        queue = values.get("queue")
        task_id = self._task_id(values, run_id, body, raw_us)
        due_us = raw_us + smear_us_of(task_id, options.smear_us)
        if due_us > reasons.latest_us:
            return _rejected(reasons.too_far)
        for slot in self._json:
            if not _is_finite(values[slot.name]):
                return _rejected(reasons.not_a_number(slot))
        priority = values.get("priority")
        expires_us = self._micros("expires", values.get("expires"))
        if len(body.encode("utf-8", "surrogatepass")) > options.max_body_bytes:
            return _rejected(reasons.too_large)
        if priority is not None and not 0 <= priority <= 255:
            return _rejected(reasons.priority)
        if queue == "":
            return _rejected(reasons.no_queue)
        if queue is not None and self._queues is not None and queue not in self._queues:
            return _rejected(reasons.unknown_queue)
        if expires_us is not None and expires_us <= due_us:
            return _rejected(reasons.expired)
        expires = None if expires_us is None else _utc_text(expires_us)
        return task_id, _utc_text(due_us), body, queue, priority, expires, None

    # --- private -------------------------------------------------------------------------

    def _due_us(self, value: Any) -> int | str:
        """Microseconds since the epoch, or why there is none."""
        if self.options.countdown is not None and value is not None and not _is_finite(value):
            return self._reasons.no_number
        due_us = self._micros("due_in", value)
        return self._reasons.no_time if due_us is None else due_us

    def _micros(self, name: str, value: Any) -> int | None:
        if value is None:
            return None
        kind = self._types[name]
        if isinstance(kind, t.TimestampType):
            return _instant_us(value)
        if isinstance(kind, t.TimestampNTZType | t.StringType):
            return _zoned_us(value, str(self.options.eta_zone))
        seconds = float(value)
        return self.options.now_us + round(max(min(seconds, 1e10), -1e10) * 1_000_000)

    def _body(self, values: Mapping[str, Any]) -> str:
        options = self.options
        args = [values[f"arg{index}"] for index in range(len(options.args))]
        kwargs = {name: values[f"kwarg{index}"] for index, name in enumerate(options.keywords)}
        return json.dumps([args, kwargs], ensure_ascii=False, separators=(",", ":"))

    def _task_id(self, values: Mapping[str, Any], run_id: str, body: str, raw_us: int) -> str:
        options = self.options
        if options.id_cols:
            key = [_key(values[slot.name], self._types[slot.name]) for slot in self._keys]
        else:
            given_us = raw_us - options.now_us if options.countdown is not None else raw_us
            key = [body, str(given_us), values.get("queue") or ""]
        return id_of_texts(run_id, options.task, *key)


def _rejected(reason: str) -> tuple[Any, ...]:
    return None, None, None, None, None, None, reason


def _plain(value: Any) -> Any:
    """Structs as dicts, all the way down."""
    if isinstance(value, t.Row):
        return {name: _plain(value[name]) for name in value.__fields__}
    if isinstance(value, list):
        return [_plain(one) for one in value]
    if isinstance(value, dict):
        return {name: _plain(one) for name, one in value.items()}
    return value


def _instant_us(value: datetime) -> int:
    """Microseconds of a timestamp of Spark's: a naive datetime in this system's zone."""
    aware = value.astimezone() if value.tzinfo is None else value
    return (aware - EPOCH) // _MICROSECOND


def _zoned_us(value: datetime | str, zone: str) -> int | None:
    try:
        at = datetime.fromisoformat(value.strip()) if isinstance(value, str) else value
    except ValueError:
        return None
    if at.tzinfo is None:
        at = at.replace(tzinfo=ZoneInfo(zone))
    return (at - EPOCH) // _MICROSECOND


def _key(value: Any, kind: t.DataType) -> str:
    if isinstance(kind, t.TimestampType):
        return str(_instant_us(value))
    return value.isoformat() if isinstance(value, date) else key_text(value)


def _is_finite(value: Any) -> bool:
    if isinstance(value, dict):
        return all(map(_is_finite, value.values()))
    if isinstance(value, list):
        return all(map(_is_finite, value))
    return not isinstance(value, float) or math.isfinite(value)


def _utc_text(us: int) -> str:
    return (EPOCH + timedelta(microseconds=us)).isoformat(timespec="microseconds")

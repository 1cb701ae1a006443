"""Ids, due times and bodies as SQL: what a row becomes on its way to the broker.

Nothing is asked of Python, and nothing depends on the time zone of a session or an executor: due
times are microseconds since the epoch, their text is made in UTC by arithmetic.
"""

from __future__ import annotations

import operator
from functools import reduce
from typing import Any

from pyspark.errors import AnalysisException
from pyspark.sql import functions as f
from pyspark.sql import types as t

from ..errors import InvalidFanOut
from .ids import NAMESPACE
from .options import FanOutOptions
from .reasons import Reasons
from .slots import Slot, check_type, column_text, slots
from .spreading import Spread

#: Columns that the rest of a fan-out reads; *error* is null where a row can be sent.
COLUMNS = ("task_id", "due_us", "eta", "body", "queue", "priority", "expires", "error")

#: Microseconds that are certainly beyond every limit, and far from overflowing: 300 years.
_ENDLESS_US = 10**16

#: A text with an offset of its own.
_HAS_OFFSET = r":\d\d(\.\d*)?\s*([zZ]|[+-]\d\d(:?\d\d)?)$"


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
    df: Any, options: FanOutOptions, *, longest_seconds: float, spread: Spread | None = None
) -> Any:
    """*df* as ``row`` beside :data:`COLUMNS`.

    Args:
        df: a DataFrame.
        options: what to make of it.
        longest_seconds: the longest delay that the app's levels hold.
        spread: how due times are spread, if they are.
    """
    frame, types = inputs(df, options)
    reasons = Reasons(options, longest_seconds)
    read = list(slots(options))
    if options.eta is not None and isinstance(types["due_in"], t.StringType | t.TimestampNTZType):
        frame = frame.withColumn("due_in", _zoned(types["due_in"], options.eta_zone))
    seconds = options.eta is None
    frame = frame.withColumn("raw_us", _micros(f.col("due_in"), options, is_seconds=seconds))
    for name, default in (("queue", "string"), ("priority", "long"), ("expires", "long")):
        if name not in types:
            frame = frame.withColumn(name, f.lit(None).cast(default))
    if "expires" in types:
        is_seconds = not isinstance(types["expires"], t.TimestampType)
        frame = frame.withColumn(
            "expires", _micros(f.col("expires"), options, is_seconds=is_seconds)
        )
    frame = frame.withColumn("body", _body(options)).withColumn("task_id", _task_id(options, types))
    due = f.col("raw_us")
    if options.smear_us:
        place = f.concat(f.substring("task_id", 1, 8), f.substring("task_id", 10, 4))
        due = due + f.conv(place, 16, 10).cast("long") % f.lit(options.smear_us)
    frame = frame.withColumn("due_us", due)
    error = f.coalesce(
        *(f.when(f.col(s.name).isNull(), reasons.null(s)) for s in read if s.role == "key"),
        _due_error(options, reasons),
        *(
            f.when(_not_finite(f.col(s.name), types[s.name]), reasons.not_a_number(s))
            for s in read
            if s.role == "json" and _has_floats(types[s.name])
        ),
        _rest_error(options, reasons, types),
    )
    frame = frame.withColumn("error", error)
    if spread is not None:
        frame = spread.over(frame, options.now_us)
        frame = frame.withColumn("error", f.coalesce("error", _spread_error(reasons, types)))
    fine = f.col("error").isNull()
    return frame.select(
        "row",
        "task_id",
        "due_us",
        f.when(fine, _utc_text("due_us")).alias("eta"),
        f.when(fine, f.col("body")).alias("body"),
        f.col("queue").cast("string").alias("queue"),
        f.col("priority").cast("long").alias("priority"),
        f.when(fine, _utc_text("expires")).alias("expires"),
        "error",
    )


def _check_exists(df: Any, slot: Slot) -> None:
    name = slot.column
    if isinstance(name, str) and name.lower() in map(str.lower, df.columns):
        return
    try:
        if isinstance(name, str) and "." not in name:
            raise AnalysisException("no such column")  # Spark 4 would log a page about it
        df.select(slot.column).schema  # noqa: B018  Spark Connect looks at it now
    except AnalysisException as exc:
        columns = ", ".join(df.columns)
        value = f", or lit({slot.column!r}) for all rows" if isinstance(slot.column, str) else ""
        raise InvalidFanOut(
            f"expected {slot.label} to be a column of this DataFrame ({columns}){value}, "
            f"got {column_text(slot.column)}"
        ) from exc


# ---- due times ---------------------------------------------------------------------------------


def _zoned(kind: t.DataType, zone: Any) -> Any:
    """The instant of a time without zone, null where it cannot be read."""
    text = f.trim(f.col("due_in").cast("string"))
    with_zone = f.concat(text, f.lit(" "), f.lit(zone) if isinstance(zone, str) else f.col("zone"))
    if isinstance(kind, t.StringType):
        with_zone = f.when(text.rlike(_HAS_OFFSET), text).otherwise(with_zone)
    return _try_timestamp(with_zone)


def _try_timestamp(text: Any) -> Any:
    # Of the session's default type; a timestamp without zone would be read in the session's.
    return f.try_to_timestamp(text).cast("timestamp_ltz")


def _micros(column: Any, options: FanOutOptions, *, is_seconds: bool) -> Any:
    """Microseconds since the epoch; null where there is no such time."""
    # least() and greatest() pass over nulls.
    if not is_seconds:
        us = f.least(f.unix_micros(column), f.lit(options.now_us + _ENDLESS_US))
        return f.when(column.isNotNull(), us)
    us = f.round(column.cast("double") * 1_000_000)
    within = f.greatest(f.least(us, f.lit(float(_ENDLESS_US))), f.lit(float(-_ENDLESS_US)))
    return f.when(us.isNotNull() & ~f.isnan(us), f.lit(options.now_us) + within.cast("long"))


def _due_error(options: FanOutOptions, reasons: Reasons) -> Any:
    due_in, due_us = f.col("due_in"), f.col("due_us")
    errors = f.when(due_us.isNull(), reasons.no_time)
    if options.countdown is not None:
        seconds = due_in.cast("double")
        endless = f.abs(seconds) == f.lit(float("inf"))
        errors = f.when(due_in.isNull(), reasons.no_time).when(
            f.isnan(seconds) | endless, reasons.no_number
        )
    elif options.eta_zone is not None:
        errors = errors.when(f.col("raw_us").isNull(), reasons.no_time)
    if options.past == "reject":
        errors = errors.when(f.col("raw_us") < options.now_us, reasons.past)
    return errors.when(due_us > reasons.latest_us, reasons.too_far)


def _utc_text(name: str) -> Any:
    """ISO 8601 text of microseconds since the epoch, always of 32 characters."""
    parts = [
        f"cast(date_from_unix_date(cast({name} div 86400000000 as int)) as string), 'T'",
        f"lpad(cast({name} div 3600000000 % 24 as string), 2, '0'), ':'",
        f"lpad(cast({name} div 60000000 % 60 as string), 2, '0'), ':'",
        f"lpad(cast({name} div 1000000 % 60 as string), 2, '0'), '.'",
        f"lpad(cast({name} % 1000000 as string), 6, '0'), '+00:00'",
    ]
    return f.expr(f"concat({', '.join(parts)})")


# ---- ids and bodies ----------------------------------------------------------------------------


def _task_id(options: FanOutOptions, types: dict[str, t.DataType]) -> Any:
    """Task ids in SQL: UUID 5, as :func:`ids.task_id_of` makes them."""
    if options.id_cols:
        names = [f"key{index}" for index in range(len(options.id_cols))]
        key = [
            f.unix_micros(name) if isinstance(types[name], t.TimestampType) else f.col(name)
            for name in names
        ]
    else:
        key = [f.col("body"), f.col("raw_us"), f.coalesce(f.col("queue"), f.lit(""))]
        if options.countdown is not None:  # as given: another time to count from is no other task
            key[1] = f.col("raw_us") - options.now_us
    texts = [f.lit(options.run_id), f.lit(options.task), *(part.cast("string") for part in key)]
    counted = [f.concat(f.char_length(text).cast("string"), f.lit(":"), text) for text in texts]
    space = f.unhex(f.lit(NAMESPACE.hex))
    digest = f.sha1(f.concat(space, *(f.encode(text, "UTF-8") for text in counted)))
    variant = f.translate(f.substring(digest, 17, 1), "0123456789abcdef", "89ab" * 4)
    return f.concat(
        *(f.substring(digest, 1, 8), f.lit("-"), f.substring(digest, 9, 4), f.lit("-5")),
        *(f.substring(digest, 14, 3), f.lit("-"), variant, f.substring(digest, 18, 3)),
        *(f.lit("-"), f.substring(digest, 21, 12)),
    )


def _body(options: FanOutOptions) -> Any:
    """``[args, kwargs]`` as JSON text."""
    positional = f.concat_ws(",", *(_json_of(f"arg{index}") for index in range(len(options.args))))
    names = options.keywords
    keyword = f.lit("{}")
    if names:
        fields = [f.col(f"kwarg{index}").alias(name) for index, name in enumerate(names)]
        keyword = f.to_json(f.struct(*fields), {"ignoreNullFields": "false"})
    return f.concat(f.lit("[["), positional, f.lit("],"), keyword, f.lit("]"))


def _json_of(name: str) -> Any:
    """The JSON of one column: what stands in ``{"v":…}``."""
    text = f.to_json(f.struct(f.col(name).alias("v")), {"ignoreNullFields": "false"})
    return text.substr(f.lit(6), f.length(text) - 6)


# ---- what cannot be sent -----------------------------------------------------------------------


def _not_finite(column: Any, kind: Any) -> Any:
    """True where *column* holds a number that is none: to_json() would make a text of it."""
    wrong: Any = None
    match kind:
        case t.FloatType() | t.DoubleType():
            wrong = f.isnan(column) | (f.abs(column) == f.lit(float("inf")))
        case t.ArrayType():
            wrong = f.exists(column, lambda one: _not_finite(one, kind.elementType))
        case t.MapType():
            wrong = _not_finite(f.map_values(column), t.ArrayType(kind.valueType))
        case t.StructType():
            fields = (one for one in kind.fields if _has_floats(one.dataType))
            parts = (_not_finite(column.getField(one.name), one.dataType) for one in fields)
            wrong = reduce(operator.or_, parts)
    return f.coalesce(wrong, f.lit(False))


def _has_floats(kind: Any) -> bool:
    match kind:
        case t.ArrayType():
            return _has_floats(kind.elementType)
        case t.MapType():
            return _has_floats(kind.valueType)
        case t.StructType():
            return any(_has_floats(one.dataType) for one in kind.fields)
    return isinstance(kind, t.FloatType | t.DoubleType)


def _spread_error(reasons: Reasons, types: dict[str, t.DataType]) -> Any:
    errors = f.when(f.col("due_us") > reasons.latest_us, reasons.too_far)
    if "expires" in types:
        errors = errors.when(f.col("expires") <= f.col("due_us"), reasons.expired)
    return errors


def _rest_error(options: FanOutOptions, reasons: Reasons, types: dict[str, t.DataType]) -> Any:
    errors = f.when(f.octet_length("body") > options.max_body_bytes, reasons.too_large)
    if "priority" in types:
        errors = errors.when(~f.col("priority").between(0, 255), reasons.priority)
    if "queue" in types:
        errors = errors.when(f.col("queue") == "", reasons.no_queue)
    if "expires" in types:
        errors = errors.when(f.col("expires") <= f.col("due_us"), reasons.expired)
    return errors

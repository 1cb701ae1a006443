"""The columns that ``FanOut`` reads, and the Spark types that are allowed for each column."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from pyspark.sql import types as t

from ..errors import InvalidFanOut
from .options import Columnar, FanOutOptions

_WHOLE = (t.ByteType, t.ShortType, t.IntegerType, t.LongType)
_FLOAT = (t.FloatType, t.DoubleType)
_NTZ = (t.TimestampNTZType, t.StringType)
_TEXTS = (t.StringType, t.VarcharType, t.CharType)

#: The types that a column may have, by the column's role, and words for the error message.
_ROLES: dict[str, tuple[tuple[type[t.DataType], ...], str]] = {
    "due": ((t.TimestampType,), "a timestamp"),
    "countdown": ((*_WHOLE, *_FLOAT, t.DecimalType), "a number of seconds"),
    "zone": ((*_TEXTS, t.NullType), "text"),
    "key": (
        (*_TEXTS, *_WHOLE, t.BooleanType, t.DateType, t.TimestampType),
        "text, a whole number, a boolean, date or timestamp: cast it",
    ),
    "queue": ((*_TEXTS, t.NullType), "text"),
    "priority": ((*_WHOLE, t.NullType), "a whole number"),
    "expires": ((*_WHOLE, *_FLOAT, t.TimestampType), "a timestamp or a number of seconds"),
}


@dataclass(frozen=True)
class Slot:
    """A column that ``FanOut`` reads."""

    name: str
    """The column's name inside ``FanOut``, such as "due_in"."""
    label: str
    """The option that gives the column, such as "eta" or "args[0]"."""
    column: Columnar
    #: The use of the column, such as "due" or "json", which decides the allowed Spark types.
    role: str


def slots(options: FanOutOptions) -> Iterator[Slot]:
    """Yield the columns that ``FanOut`` reads: due times, arguments, queue, and so on."""
    if options.eta is not None:
        yield Slot("due_in", "eta", options.eta, "due")
        if options.eta_zone is not None and not isinstance(options.eta_zone, str):
            yield Slot("zone", "eta_zone", options.eta_zone, "zone")
    else:
        yield Slot("due_in", "countdown", options.countdown, "countdown")
    for index, column in enumerate(options.args):
        yield Slot(f"arg{index}", f"args[{index}]", column, "json")
    for index, (argument, column) in enumerate(options.keywords.items()):
        yield Slot(f"kwarg{index}", f"kwargs[{argument!r}]", column, "json")
    for index, column in enumerate(options.id_cols):
        yield Slot(f"key{index}", f"id_cols[{index}]", column, "key")
    for name in ("queue", "priority", "expires"):
        if getattr(options, name) is not None:
            yield Slot(name, name, getattr(options, name), name)


def check_type(slot: Slot, kind: t.DataType, *, has_zone: bool) -> None:
    """Check that a column's Spark type fits the column's use, such as due time.

    Raises:
        InvalidFanOut: the type is not allowed. The message says which cast to use.
    """
    expected = _expected(slot.role, kind, has_zone=has_zone)
    if expected:
        raise InvalidFanOut(
            f"expected {slot.label} ({column_text(slot.column)}) to be {expected}, "
            f"got {kind.simpleString()}"
        )


def no_such_column(slot: Slot, columns: Sequence[str]) -> InvalidFanOut:
    """Return the error for an unknown or ambiguous column name."""
    name = slot.column
    alike = [one for one in columns if isinstance(name, str) and one.lower() == name.lower()]
    if len(alike) > 1:
        return InvalidFanOut(
            f"expected {slot.label} to be one column of this DataFrame, got {column_text(name)}, "
            f"which may be any of {', '.join(alike)}: rename or drop the others"
        )
    if isinstance(name, str) and name in columns:
        return InvalidFanOut(
            f"expected {slot.label} to be a column of this DataFrame, got {column_text(name)}, "
            f"which means the field behind the dot: write '`{name}`' with backticks for the column"
        )
    value = f", or lit({name!r}) for all rows" if isinstance(name, str) else ""
    return InvalidFanOut(
        f"expected {slot.label} to be a column of this DataFrame ({', '.join(columns)}){value}, "
        f"got {column_text(name)}"
    )


def column_text(column: Columnar) -> str:
    return f"column {column!r}" if isinstance(column, str) else str(column)


def _expected(role: str, kind: t.DataType, *, has_zone: bool) -> str:
    """Return "" if the Spark type is allowed, else a text that names the allowed types."""
    if role == "json":
        return _not_json(kind)
    if role == "due" and has_zone and isinstance(kind, _NTZ):
        return ""
    if role == "due" and isinstance(kind, _NTZ):
        return "a timestamp with zone; say with eta_zone= which zone it is in"
    types, words = _ROLES[role]
    return "" if isinstance(kind, types) else words


def _not_json(kind: Any) -> str:
    """Return "" if the Spark type can become JSON, else the text for the error."""
    match kind:
        case t.StructType():
            if len({*kind.names}) < len(kind.names):
                return "what JSON has: structs whose fields all have names of their own"
            return next(filter(None, (_not_json(f.dataType) for f in kind.fields)), "")
        case t.ArrayType():
            return _not_json(kind.elementType)
        case t.MapType():
            keys = "" if isinstance(kind.keyType, _TEXTS) else "a map with keys of text"
            return keys or _not_json(kind.valueType)
        case t.DecimalType():
            return "what JSON has: cast decimals to string, or to double"
        case t.TimestampType() | t.TimestampNTZType() | t.DateType():
            return "what JSON has: make text of times and dates with date_format()"
        case t.BinaryType():
            return "what JSON has: make text of bytes with base64()"
    plain = isinstance(kind, (*_TEXTS, *_WHOLE, *_FLOAT, t.BooleanType, t.NullType))
    return "" if plain else "what JSON has: text, numbers, booleans, arrays, maps and structs"

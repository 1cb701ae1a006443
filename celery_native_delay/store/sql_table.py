"""The tables of a store in a database: its waiting tasks, and the state about them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, TypeVar

from sqlalchemy import (
    BigInteger,
    Column,
    Connection,
    Index,
    Integer,
    MetaData,
    SmallInteger,
    String,
    Table,
    Text,
    event,
)
from sqlalchemy.dialects.mysql import LONGTEXT

from ..texts import digest_of, storable
from ..urls import TABLE_PREFIX, is_table_prefix

T = TypeVar("T")

METADATA = MetaData()

_LONG_TEXT = Text().with_variant(LONGTEXT(), "mysql", "mariadb")  # MySQL's TEXT ends at 64 kB

#: Options of our tables. By default, MySQL takes "Shop", "shop" and "shop " for the same name.
_OPTIONS: dict[str, Any] = {
    f"{dialect}_{option}": value
    for dialect in ("mysql", "mariadb")
    for option, value in {
        "engine": "InnoDB",
        "charset": "utf8mb4",
        "collate": "utf8mb4_bin",
    }.items()
}

#: The states of a row. The numbers are in the table. A cancelled row is published at once, so that
#: a worker announces the task as revoked; it is not listed any more.
WAITING, TAKEN, PARKED, CANCELLED, CANCELLED_AND_TAKEN = 0, 1, 2, 3, 4

_LONGEST_ID = 255

#: One row per waiting task. Never change the columns: changed columns need another table.
TASKS = Table(
    "native_delay_task",
    METADATA,
    # SQLite numbers rows by itself only if the type is INTEGER.
    Column("id", BigInteger().with_variant(Integer, "sqlite"), primary_key=True),
    Column("namespace", String(64), nullable=False),
    # A digest of the row's name, which may be too long for an index of MySQL.
    Column("digest", String(32), nullable=False),
    # For searches by task id, see short_id(). MySQL cannot index longer texts.
    Column("task_id", String(_LONGEST_ID), nullable=False),
    Column("state", SmallInteger, nullable=False),
    # When a dispatcher takes the row: its due time, the end of a lease, or the next attempt after a
    # refusal. In microseconds since the epoch.
    Column("next_us", BigInteger, nullable=False),
    Column("taken_by", String(32)),
    Column("refusals", SmallInteger, nullable=False),
    Column("reason", Text),
    Column("entry", _LONG_TEXT, nullable=False),
    # With the id, by which tasks of the same time are listed.
    Index("native_delay_task_next", "namespace", "state", "next_us", "id"),
    Index("native_delay_task_id", "namespace", "task_id"),
    Index("native_delay_task_name", "namespace", "digest", unique=True),
    **_OPTIONS,
)

#: Never change the columns: changed columns need a table with another name. Each stored state, in
#: the column *text*, has its own version.
RECORDS = Table(
    "native_delay_record",
    METADATA,
    Column("owner", String(64), primary_key=True),
    Column("kind", String(16), primary_key=True),
    # A digest of the name, which may be too long for an index of MySQL.
    Column("digest", String(32), primary_key=True),
    Column("name", Text, nullable=False),
    Column("text", _LONG_TEXT, nullable=False),
    # The record is valid until then, in microseconds since the epoch.
    Column("kept_us", BigInteger, nullable=False),
    Index("native_delay_record_kept", "owner", "kind", "kept_us"),
    **_OPTIONS,
)

LISTED = TASKS.c.state.in_((WAITING, PARKED))

_TABLE_NAMES = re.compile(rf"\b{TABLE_PREFIX}(?=(task|record)\b)")


def table_name(prefix: str, name: str) -> str:
    """Return the name of a table or an index as it begins with *prefix*."""
    return prefix + name.removeprefix(TABLE_PREFIX)


def schema(prefix: str) -> MetaData:
    """Return all tables of a store, whose names and indexes begin with *prefix*."""
    found = MetaData()
    for table in METADATA.tables.values():
        named: Any = table.to_metadata(found, name=table_name(prefix, table.name))
        for index in named.indexes:
            index.name = table_name(prefix, index.name)
    return found


def other_prefix(mine: str, names: Iterable[str]) -> str | None:
    """Return another prefix than *mine* with which a store's tables are among *names*."""
    both = set(names)
    prefixes = sorted(name.removesuffix("task") for name in both if name.endswith("task"))
    ours = (each for each in prefixes if is_table_prefix(each) and f"{each}record" in both)
    return next((each for each in ours if each != mine), None)


def naming_tables(place: T, prefix: str) -> T:
    """Let statements on *place*, an engine or a connection, name our tables with *prefix*.

    Our statements are made once, for the tables' usual names. They have no values, which are
    parameters.
    """
    if prefix != TABLE_PREFIX:
        event.listen(place, "before_cursor_execute", _names(prefix), retval=True)
    return place


@cache
def _names(prefix: str) -> Callable[..., tuple[str, Any]]:
    def name(
        connection: Any, cursor: Any, statement: str, parameters: Any, context: Any, many: bool
    ) -> tuple[str, Any]:
        return _TABLE_NAMES.sub(prefix, statement), parameters

    return name


@contextmanager
def tables_named(connection: Connection, prefix: str) -> Iterator[None]:
    """Let *connection*, which is the user's, name our tables with *prefix* in a ``with`` block."""
    naming_tables(connection, prefix)
    try:
        yield
    finally:
        if prefix != TABLE_PREFIX:
            event.remove(connection, "before_cursor_execute", _names(prefix))


def short_id(task_id: str) -> str:
    # MySQL ignores a space at the end of a text.
    is_exact = len(task_id) <= _LONGEST_ID and not task_id.endswith(" ")
    return storable(task_id) if is_exact else digest_of(task_id)

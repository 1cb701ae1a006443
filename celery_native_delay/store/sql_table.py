"""The table of the waiting tasks in a database."""

from __future__ import annotations

from typing import Any

from sqlalchemy import (
    BigInteger,
    Column,
    Index,
    Integer,
    MetaData,
    SmallInteger,
    String,
    Table,
    Text,
)

from ..records.database import table_name
from ..records.sql import LONG_TEXT, RECORDS, TABLE_OPTIONS
from ..texts import digest_of, storable

METADATA = MetaData()

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
    Column("entry", LONG_TEXT, nullable=False),
    # With the id, by which tasks of the same time are listed.
    Index("native_delay_task_next", "namespace", "state", "next_us", "id"),
    Index("native_delay_task_id", "namespace", "task_id"),
    Index("native_delay_task_name", "namespace", "digest", unique=True),
    **TABLE_OPTIONS,
)

LISTED = TASKS.c.state.in_((WAITING, PARKED))


def schema(prefix: str) -> MetaData:
    """Return all tables of a store, whose names and indexes begin with *prefix*."""
    found = MetaData()
    for table in (TASKS, RECORDS):
        named: Any = table.to_metadata(found, name=table_name(prefix, table.name))
        for index in named.indexes:
            index.name = table_name(prefix, index.name)
    return found


def short_id(task_id: str) -> str:
    # MySQL ignores a space at the end of a text.
    is_exact = len(task_id) <= _LONGEST_ID and not task_id.endswith(" ")
    return storable(task_id) if is_exact else digest_of(task_id)

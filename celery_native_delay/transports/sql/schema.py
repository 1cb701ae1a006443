"""The tables of a timeout store. What stands here is frozen: to change it, add a version."""

from __future__ import annotations

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
from sqlalchemy.dialects.mysql import LONGTEXT

VERSION = 1

METADATA = MetaData()

#: A message that waits, or is parked.
MESSAGES = Table(
    "native_delay_message",
    METADATA,
    # SQLite counts up by itself only what is called INTEGER.
    Column("id", BigInteger().with_variant(Integer, "sqlite"), primary_key=True),
    Column("namespace", String(64), nullable=False),
    # Microseconds since the epoch; NULL for one that is parked, so that no dispatcher meets it.
    Column("due_us", BigInteger),
    # Where kombu puts it; '' for a broadcast, whose exchange stands in the envelope.
    Column("queue", Text, nullable=False),
    # kombu's message as JSON, with our header.
    # MySQL's TEXT ends at 64 kB.
    Column("envelope", Text().with_variant(LONGTEXT(), "mysql", "mariadb"), nullable=False),
    # To be found by; MySQL indexes no longer text.
    Column("task_id", String(255), nullable=False),
    # How often its destination refused it, and what it said.
    Column("attempts", SmallInteger, nullable=False, server_default="0"),
    Column("reason", Text),
    Index("native_delay_message_due", "namespace", "due_us"),
    Index("native_delay_message_task", "namespace", "task_id"),
)

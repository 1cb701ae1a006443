"""The table of waiting messages. A change of the columns needs a new table name."""

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

#: One row per waiting or parked message.
MESSAGES = Table(
    "native_delay_message",
    METADATA,
    # SQLite numbers rows by itself only if the type is INTEGER.
    Column("id", BigInteger().with_variant(Integer, "sqlite"), primary_key=True),
    Column("namespace", String(64), nullable=False),
    # Microseconds since the epoch; NULL for a parked message, so that no dispatcher selects it.
    Column("due_us", BigInteger),
    # The destination queue; '' for a message to a fanout exchange, which is in the envelope.
    Column("queue", Text, nullable=False),
    # kombu's message as JSON, with our header.
    # MySQL's TEXT ends at 64 kB.
    Column("envelope", Text().with_variant(LONGTEXT(), "mysql", "mariadb"), nullable=False),
    # For searches by task id. MySQL cannot index longer texts.
    Column("task_id", String(255), nullable=False),
    # How often the queue rejected the message, and the last error.
    Column("attempts", SmallInteger, nullable=False, server_default="0"),
    Column("reason", Text),
    Index("native_delay_message_due", "namespace", "due_us"),
    Index("native_delay_message_task", "namespace", "task_id"),
)

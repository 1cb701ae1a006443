"""Stores state about waiting tasks, and a list of waiting messages, in a database.

Each change is one transaction. Producers and workers wait at most 0.3 s for a slow database.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from hashlib import blake2b
from time import time_ns
from typing import Any

from sqlalchemy import (
    BigInteger,
    Column,
    Connection,
    Engine,
    MetaData,
    String,
    Table,
    Text,
    bindparam,
    delete,
    insert,
    select,
    update,
)
from sqlalchemy import Index as TableIndex
from sqlalchemy import text as sql_text
from sqlalchemy.dialects import postgresql
from sqlalchemy.dialects.mysql import LONGTEXT

from ..errors import NativeDelayError, RecordsUnavailable
from ..finding import WRONG, Finding, clock_finding
from .database import Database, clock_ahead_seconds, now_us
from .interface import (
    MARK_GRACE_MS,
    STALE_AFTER_US,
    UNDECIDED,
    VOID,
    Change,
    CompareAndSet,
    Decide,
    IndexEntry,
    MessageState,
    Publish,
    RecordName,
    Snapshot,
    T,
    delivery_of,
)
from .replacing import ComparedRecords, RecordedTasks, Republishes
from .sql_listing import SqlListing
from .sql_thread import SqlThread
from .waiting import Waiting, WaitingTasks

METADATA = MetaData()

_LONG = Text().with_variant(LONGTEXT(), "mysql", "mariadb")  # MySQL's TEXT ends at 64 kB

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
    Column("text", _LONG, nullable=False),
    # The record is valid until then, in microseconds since the epoch.
    Column("kept_us", BigInteger, nullable=False),
    TableIndex("native_delay_record_kept", "owner", "kind", "kept_us"),
)

#: The list of waiting messages: one row per message that waits on RabbitMQ, SQS or pgmq.
WAITING = Table(
    "native_delay_waiting",
    METADATA,
    Column("owner", String(64), primary_key=True),
    Column("delivery_id", String(64), primary_key=True),
    Column("due_us", BigInteger, nullable=False),
    Column("task_id", String(255), nullable=False),
    Column("entry", _LONG, nullable=False),
    TableIndex("native_delay_waiting_due", "owner", "due_us"),
    TableIndex("native_delay_waiting_task", "owner", "task_id"),
)

#: One row per message that workers must drop, with the mark "void" or "undecided".
MARKS = Table(
    "native_delay_mark",
    METADATA,
    Column("owner", String(64), primary_key=True),
    Column("delivery_id", String(64), primary_key=True),
    Column("mark", String(16), nullable=False),
    Column("kept_us", BigInteger, nullable=False),
    TableIndex("native_delay_mark_kept", "owner", "kept_us"),
)

_RECORD, _WAITING, _MARK = RECORDS.c, WAITING.c, MARKS.c

_OURS = _RECORD.owner == bindparam("mine"), _RECORD.kind == bindparam("its")
#: Locks rows in one order for all processes, so that no two processes wait for each other.
_LOCK = (
    select(_RECORD.digest, _RECORD.text, _RECORD.kept_us)
    .where(*_OURS, _RECORD.digest.in_(bindparam("these", expanding=True)))
    .order_by(_RECORD.digest)
    .with_for_update()
)
_UPDATE = (
    update(RECORDS)
    .where(*_OURS, _RECORD.digest == bindparam("this"))
    .values(text=bindparam("new"), kept_us=bindparam("until"))
)


class SqlRecords(Database, ComparedRecords):
    """The state about waiting tasks, and the list of waiting messages, in a database."""

    tables = METADATA

    def __init__(self, url: str, owner: str, *, engine: Engine | None = None) -> None:
        super().__init__(url, setting="native_delay_records", engine=engine)
        self.owner = owner if len(owner) <= 64 else _digest(owner)
        self._thread = SqlThread(self.engine, self.where, self.make_tables, _note_all)

    @property
    def missed(self) -> int:  # type: ignore[override]
        return self._thread.missed

    # --- records -------------------------------------------------------------------------

    def change(self, name: RecordName, decide: Decide[T], publish: Publish | None = None) -> T:
        if publish is not None and self.has_marks:
            return super().change(name, decide, publish)

        def changed(connection: Connection) -> T:
            row = self.read_row(connection, name, locked=True)
            snapshot = self._snapshot(connection, row, locked=True)
            change = decide(snapshot)
            if change.text != snapshot.text:
                self.write_row(connection, name, change.text, change.kept_us, row is not None)
            if change.replaces:
                self._cancel(connection, [message for message, _ in snapshot.messages])
            if change.due_us is not None:
                self._publish(connection, change.due_us, publish)
            return change.answer

        return self.do(changed)

    def change_all(
        self,
        names: Sequence[RecordName],
        decide: Callable[[Sequence[Snapshot]], tuple[Sequence[Change[Any]], T]],
    ) -> T:
        """Change several stored states of one kind in one transaction."""
        digests = [_digest(name.name) for name in names]
        mine: dict[str, Any] = {"mine": self.owner, "its": names[0].kind}

        def changed(connection: Connection) -> T:
            rows = {row[0]: row for row in connection.execute(_LOCK, mine | {"these": digests})}
            at_us = now_us(connection)
            valid = {row[0]: row[1] for row in rows.values() if row[2] >= at_us}
            changes, answer = decide([Snapshot(at_us, valid.get(digest)) for digest in digests])
            updated = []
            for name, digest, change in zip(names, digests, changes, strict=True):
                if digest not in rows:
                    self.write_row(connection, name, change.text, change.kept_us, is_there=False)
                elif change.text != valid.get(digest):
                    new = {"this": digest, "new": change.text, "until": change.kept_us}
                    updated.append(mine | new)
            if updated:
                connection.execute(_UPDATE, updated)
            return answer

        return self.do(changed)

    def _cancel(self, connection: Connection, members: Sequence[Any]) -> None:
        at_us = now_us(connection)
        due_us = self._locked_due_us(connection, [delivery_of(member) for member in members])
        for delivery in due_us:
            kept_us = max(due_us[delivery], at_us) + MARK_GRACE_MS * 1000
            self._set_mark(connection, delivery, VOID, kept_us)
            connection.execute(delete(WAITING).where(*self._listed(delivery)))

    def _publish(self, connection: Connection, due_us: int, publish: Publish | None) -> None:
        """Publish a message in the caller's transaction; implemented only for SQL brokers."""
        raise NotImplementedError

    def load(self, names: Sequence[RecordName]) -> list[str | None]:
        def loaded(connection: Connection) -> list[str | None]:
            at_us = now_us(connection)
            rows = (self.read_row(connection, name) for name in names)
            return [None if row is None or row[1] < at_us else row[0] for row in rows]

        return self.look_up(loaded)

    def latest(self, kind: str, limit: int) -> tuple[int, list[tuple[str, str]]]:
        def found(connection: Connection) -> tuple[int, list[tuple[str, str]]]:
            at_us = now_us(connection)
            asked = (
                select(_RECORD.name, _RECORD.text)
                .where(_RECORD.owner == self.owner, _RECORD.kind == kind, _RECORD.kept_us > at_us)
                .order_by(_RECORD.kept_us.desc())
                .limit(limit)
            )
            return at_us, [(name, text) for name, text in connection.execute(asked)]

        return self.look_up(found)

    def close(self) -> None:
        self._thread.close()
        self.engine.dispose()

    # --- publishing and receiving ----------------------------------------------------------

    def note(self, listed: IndexEntry) -> None:
        self._thread.note(self._row(listed))

    def forget(self, member: str) -> None:
        self._thread.post(lambda connection: connection.execute(self._strike(member)))

    def flush(self, timeout_seconds: float | None = None) -> None:
        self._thread.flush(timeout_seconds)

    def connect(self) -> bool:
        return self._thread.ask(lambda connection: True) is not None

    def received(self, member: str) -> bool | None:
        return self._thread.ask(lambda connection: self._received(connection, member))

    def _received(self, connection: Connection, member: str) -> bool:
        delivery = delivery_of(member)
        mark = select(_MARK.mark).where(*self._marked(delivery))
        # In most cases one round trip is enough: the entry is there, and has no mark.
        struck = self._strike(member).where(~mark.exists())
        if connection.execute(struck).rowcount:
            return True
        if connection.dialect.name == "postgresql":
            # The mark "void" must survive a crash of the database, because the message is dropped.
            connection.execute(sql_text("SET LOCAL synchronous_commit TO on"))
        void = update(MARKS).where(*self._marked(delivery), _MARK.mark == UNDECIDED)
        connection.execute(void.values(mark=VOID))
        connection.execute(self._strike(member))
        return connection.execute(mark).first() is None

    # --- replacing -----------------------------------------------------------------------

    def look(self, name: RecordName | None, undecided: str | None, mark_ms: int) -> Snapshot:
        def read(connection: Connection) -> Snapshot:
            row = None if name is None else self.read_row(connection, name)
            snapshot = self._snapshot(connection, row)
            if undecided:
                kept_us = snapshot.now_us + mark_ms * 1000
                self._set_mark(connection, undecided, UNDECIDED, kept_us)
            return snapshot

        return self.do(read) if undecided else self.look_up(read)

    def _snapshot(
        self, connection: Connection, row: tuple[str, int] | None, *, locked: bool = False
    ) -> Snapshot:
        """Return the state in *row*, and the waiting messages of the task whose id is in *row*."""
        # Ask for the time after locking the row: the lock may have taken a while.
        at_us = now_us(connection)
        if row is None or row[1] < at_us:
            return Snapshot(at_us, None)
        task_id = json.loads(row[0]).get("id") if row[0].startswith("{") else None
        if task_id is None:
            return Snapshot(at_us, row[0])
        return Snapshot(at_us, row[0], self._messages(connection, task_id, locked=locked))

    def unmark(self, delivery_id: str, left_ms: int = 0) -> None:
        def unmarked(connection: Connection) -> None:
            this = self._marked(delivery_id)
            if left_ms:
                until_us = now_us(connection) + left_ms * 1000
                connection.execute(update(MARKS).where(*this).values(kept_us=until_us))
            else:
                connection.execute(delete(MARKS).where(*this))

        self.do(unmarked)

    def compare_and_set(self, step: CompareAndSet) -> bool:
        def done(connection: Connection) -> bool:
            before = (
                None if step.name is None else self.read_row(connection, step.name, locked=True)
            )
            gone = [delivery_of(member) for member in step.gone]
            due_us = self._locked_due_us(connection, gone) if gone else {}
            new = None if step.new is None else delivery_of(step.new.member)
            mark = None if new is None else self._mark(connection, new)
            at_us = now_us(connection)
            text = None if before is None or before[1] < at_us else before[0]
            if (
                (step.name is not None and text != step.before)
                or len(due_us) < len(gone)
                or (new is not None and mark != UNDECIDED)
            ):
                if mark is not None:
                    voided = update(MARKS).where(*self._marked(str(new))).values(mark=VOID)
                    connection.execute(voided)
                return False
            if step.name is not None:
                kept_us = at_us + step.kept_ms * 1000
                self.write_row(connection, step.name, step.after, kept_us, before is not None)
            self._cancel(connection, step.gone)
            if step.new is not None:
                connection.execute(delete(MARKS).where(*self._marked(str(new))))
                if step.new.entry:
                    connection.execute(insert(WAITING).values(self._row(step.new)))
            return True

        return self.do(done)

    def state_of(self, member: str) -> MessageState:
        def read(connection: Connection) -> MessageState:
            mark = self._mark(connection, delivery_of(member))
            if mark == VOID:
                return MessageState.VOID
            # A message with the mark "undecided" is about to replace another message.
            listed = select(_WAITING.due_us).where(*self._listed(delivery_of(member)))
            is_known = mark or connection.execute(listed).first()
            return MessageState.KNOWN if is_known else MessageState.UNKNOWN

        return self.look_up(read)

    def tasks(self, republishes: Republishes) -> WaitingTasks:
        return SqlTasks(self, republishes)

    # --- upkeep --------------------------------------------------------------------------

    def sweep(self) -> int:
        def swept(connection: Connection) -> int:
            at_us = now_us(connection)
            for table in (RECORDS, MARKS):
                connection.execute(
                    delete(table).where(table.c.owner == self.owner, table.c.kept_us < at_us)
                )
            lost = delete(WAITING).where(_WAITING.owner == self.owner)
            return connection.execute(lost.where(_WAITING.due_us < at_us - STALE_AFTER_US)).rowcount

        # An app that never used records needs no right to create tables.
        return self.do(swept) if self.is_ready else 0

    def purge(self) -> None:
        mine = delete(WAITING).where(_WAITING.owner == self.owner)
        self.do(lambda found: found.execute(mine.where(_WAITING.due_us >= time_ns() // 1000)))

    def clear(self) -> int:
        def deleted(connection: Connection) -> int:
            tables = (RECORDS, WAITING, MARKS)
            each = (delete(table).where(table.c.owner == self.owner) for table in tables)
            return sum(connection.execute(statement).rowcount for statement in each)

        return int(self.do(deleted))

    def findings(self) -> Iterator[Finding]:
        where = f"native_delay_records at {self.where}"
        try:
            self.do(lambda connection: connection.execute(delete(MARKS).where(_MARK.owner == "")))
            ahead_seconds = self.look_up(clock_ahead_seconds)
        except RecordsUnavailable as exc:
            yield Finding(
                "records",
                WRONG,
                f"{where} does not answer: {exc}",
                "start it, or correct host, user, password and database of its URL, in workers and "
                "producers; its user must be able to write to it",
            )
            return
        if ahead_seconds is not None:
            yield from clock_finding(
                "the clock of the records' database",
                ahead_seconds,
                "debounced and rate-limited tasks are early or late by that",
                check="records",
            )

    # --- transactions --------------------------------------------------------------------

    def _tried(
        self, connect: Callable[[], AbstractContextManager[Connection]], work: Callable[[Any], T]
    ) -> T:
        self._thread.flush()
        return super()._tried(connect, work)

    def _unavailable(self, reason: str) -> NativeDelayError:
        return RecordsUnavailable(f"the records at {self.where} are unreachable: {reason}")

    # --- rows ----------------------------------------------------------------------------

    def _this(self, name: RecordName) -> tuple[Any, ...]:
        digest = _digest(name.name)
        return (_RECORD.owner == self.owner, _RECORD.kind == name.kind, _RECORD.digest == digest)

    def read_row(
        self, connection: Connection, name: RecordName, *, locked: bool = False
    ) -> tuple[str, int] | None:
        """Return a stored state and its expiry (epoch microseconds); *locked* locks the row."""
        asked = select(_RECORD.text, _RECORD.kept_us).where(*self._this(name))
        return connection.execute(asked.with_for_update() if locked else asked).first()

    def write_row(
        self,
        connection: Connection,
        name: RecordName,
        text: str | None,
        kept_us: int,
        is_there: bool,
    ) -> None:
        """Insert, update or delete (if *text* is None) the row of a stored state.

        *kept_us* is the time when the state expires, in microseconds since the epoch. *is_there* is
        True if the row exists.
        """
        this = self._this(name)
        if text is None:
            connection.execute(delete(RECORDS).where(*this))
        elif is_there:
            connection.execute(update(RECORDS).where(*this).values(text=text, kept_us=kept_us))
        else:
            row: dict[str, Any] = {
                "owner": self.owner,
                "kind": name.kind,
                "digest": _digest(name.name),
            }
            row |= {"name": name.name.replace("\0", "\ufffd"), "text": text, "kept_us": kept_us}
            connection.execute(insert(RECORDS).values(row))

    def _messages(
        self, connection: Connection, task_id: str, *, locked: bool
    ) -> tuple[tuple[Any, int], ...]:
        asked = select(_WAITING.delivery_id, _WAITING.due_us).where(
            _WAITING.owner == self.owner, _WAITING.task_id == task_id[:255]
        )
        rows = connection.execute(asked)
        return tuple((f"{task_id}:{delivery_id}", due_us) for delivery_id, due_us in rows)

    def _locked_due_us(self, connection: Connection, deliveries: Sequence[str]) -> dict[str, int]:
        asked = select(_WAITING.delivery_id, _WAITING.due_us).where(
            _WAITING.owner == self.owner, _WAITING.delivery_id.in_(deliveries)
        )
        return dict(connection.execute(asked.with_for_update()).all())

    def _listed(self, delivery_id: str) -> tuple[Any, ...]:
        return (_WAITING.owner == self.owner, _WAITING.delivery_id == delivery_id)

    def _marked(self, delivery_id: str) -> tuple[Any, ...]:
        return (_MARK.owner == self.owner, _MARK.delivery_id == delivery_id)

    def _mark(self, connection: Connection, delivery_id: str) -> str | None:
        asked = select(_MARK.mark).where(*self._marked(delivery_id)).with_for_update()
        mark: str | None = connection.execute(asked).scalar()
        return mark

    def _set_mark(self, connection: Connection, delivery_id: str, mark: str, kept_us: int) -> None:
        connection.execute(delete(MARKS).where(*self._marked(delivery_id)))
        row = {"owner": self.owner, "delivery_id": delivery_id, "mark": mark, "kept_us": kept_us}
        connection.execute(insert(MARKS).values(row))

    def _row(self, listed: IndexEntry) -> dict[str, Any]:
        task_id, _, delivery_id = listed.member.rpartition(":")
        return {
            "owner": self.owner,
            "delivery_id": delivery_id,
            "due_us": listed.due_us,
            "task_id": task_id[:255],
            "entry": listed.entry,
        }

    def _strike(self, member: str) -> Any:
        return delete(WAITING).where(*self._listed(delivery_of(member)))


class SqlTasks(RecordedTasks, SqlListing):
    index: SqlRecords

    def __init__(self, index: SqlRecords, republishes: Republishes) -> None:
        names = (_WAITING.task_id, _WAITING.delivery_id)
        shown = (*names, _WAITING.entry, _WAITING.due_us)
        mine = _WAITING.owner == index.owner
        SqlListing.__init__(self, mine, _WAITING.due_us, names, _WAITING.entry, shown)
        self.index = index
        self._delays = republishes

    def _look_up(self, work: Callable[[Connection], T]) -> T:
        return self.index.look_up(work)

    def _found(self, task_id: str) -> list[tuple[str, str, Waiting]]:
        asked = self._in_order.where(self._mine, _WAITING.task_id == task_id[:255])
        rows = self._look_up(lambda connection: connection.execute(asked).all())
        found = ((f"{task_id}:{row.delivery_id}", row.entry, self._decoded(row)) for row in rows)
        return [(member, entry, task) for member, entry, task in found if task is not None]

    def _decoded(self, row: Any) -> Waiting | None:
        task_id, delivery_id, entry, due_us = row
        return self._delays.waiting(f"{task_id}:{delivery_id}", entry, due_us)


def _note_all(connection: Connection, rows: list[Mapping[str, Any]]) -> None:
    """Insert rows into the table of waiting messages. Existing rows stay unchanged."""
    if connection.dialect.name == "postgresql":
        statement: Any = postgresql.insert(WAITING).on_conflict_do_nothing()
    else:
        ignoring = insert(WAITING).prefix_with("OR IGNORE", dialect="sqlite")
        statement = ignoring.prefix_with("IGNORE", dialect="mysql")
    connection.execute(statement, rows)


def _digest(name: str) -> str:
    return blake2b(name.encode(errors="surrogatepass"), digest_size=16).hexdigest()

"""Stores state about waiting tasks in a database. Each change is one transaction."""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from sqlalchemy import (
    BigInteger,
    Column,
    Connection,
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
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.dialects.mysql import LONGTEXT

from ..texts import digest_of
from .database import Database, now_us
from .interface import Change, Decide, Publish, RecordName, Records, Snapshot, T, tried_again

METADATA = MetaData()

LONG_TEXT = Text().with_variant(LONGTEXT(), "mysql", "mariadb")  # MySQL's TEXT ends at 64 kB

#: Options of our tables. By default, MySQL takes "Shop", "shop" and "shop " for the same name.
TABLE_OPTIONS: dict[str, Any] = {
    f"{dialect}_{option}": value
    for dialect in ("mysql", "mariadb")
    for option, value in {
        "engine": "InnoDB",
        "charset": "utf8mb4",
        "collate": "utf8mb4_bin",
    }.items()
}

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
    Column("text", LONG_TEXT, nullable=False),
    # The record is valid until then, in microseconds since the epoch.
    Column("kept_us", BigInteger, nullable=False),
    TableIndex("native_delay_record_kept", "owner", "kind", "kept_us"),
    **TABLE_OPTIONS,
)

_RECORD = RECORDS.c

#: Stored states that one statement reads.
_LOADED_AT_ONCE = 500

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


class _AnotherWasFirst(Exception):
    """Another transaction has inserted the row of a state."""


class SqlRecords(Records):
    """The state about waiting tasks in a database."""

    def __init__(self, database: Database, owner: str) -> None:
        self.where = database.where
        self.do, self.look_up = database.do, database.look_up
        self.owner = owner if len(owner) <= 64 else digest_of(owner)

    # --- records -------------------------------------------------------------------------

    def read(self, name: RecordName) -> Snapshot:
        return self.look_up(lambda found: self._snapshot(found, self.read_row(found, name)))

    def change(self, name: RecordName, decide: Decide[T], publish: Publish | None = None) -> T:
        def changed(connection: Connection) -> T:
            row = self.read_row(connection, name, locked=True)
            snapshot = self._snapshot(connection, row, locked=True)
            change = decide(snapshot)
            gone = [message for message, _ in snapshot.messages] if change.replaces else []
            if change.look is not None:
                change.look(self._texts(connection, gone))
            if change.text != snapshot.text:
                self.write_row(connection, name, change.text, change.kept_us, row is not None)
            if gone:
                self._cancel(connection, gone)
            if change.due_us is not None:
                self._publish(connection, change.due_us, publish)
            return change.answer

        return self._done(name, changed)

    def claim(self, name: RecordName, *, kept_us: int) -> bool:
        # One statement: of two workers at the same time, the second waits for the first to commit.
        def claimed(connection: Connection) -> bool:
            return self._inserted(connection, self._row(name, "1", now_us(connection) + kept_us))

        return self.do(claimed)

    def change_all(
        self,
        names: Sequence[RecordName],
        decide: Callable[[Sequence[Snapshot]], tuple[Sequence[Change[Any]], T]],
    ) -> T:
        """Change several stored states of one kind in one transaction."""
        digests = [digest_of(name.name) for name in names]
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

        return self._done(names[0], changed)

    def _done(self, name: RecordName, changed: Callable[[Connection], T]) -> T:
        """Call *changed* in a transaction, again if another one has made the row meanwhile."""

        def attempt() -> tuple[T] | None:
            with suppress(_AnotherWasFirst):
                return (self.do(changed),)
            return None

        return tried_again(name.name, attempt)[0]

    @abstractmethod
    def _messages(
        self, connection: Connection, task_id: str, *, locked: bool
    ) -> tuple[tuple[Any, int], ...]:
        """Return the name and the due time of each waiting message of a task."""

    @abstractmethod
    def _texts(self, connection: Connection, members: Sequence[Any]) -> Sequence[str]:
        """Read waiting messages in the caller's transaction."""

    @abstractmethod
    def _cancel(self, connection: Connection, members: Sequence[Any]) -> None:
        """Remove waiting messages in the caller's transaction."""

    @abstractmethod
    def _publish(self, connection: Connection, due_us: int, publish: Publish | None) -> None:
        """Add a message in the caller's transaction."""

    def load(self, names: Sequence[RecordName]) -> list[str | None]:
        def loaded(connection: Connection) -> list[str | None]:
            at_us = now_us(connection)
            found: dict[tuple[str, str], str] = {}
            for kind, digests in by_kind.items():
                asked = select(_RECORD.digest, _RECORD.text).where(
                    _RECORD.owner == self.owner, _RECORD.kind == kind, _RECORD.kept_us >= at_us
                )
                for start in range(0, len(digests), _LOADED_AT_ONCE):
                    some = _RECORD.digest.in_(digests[start : start + _LOADED_AT_ONCE])
                    found |= {
                        (kind, row[0]): row[1] for row in connection.execute(asked.where(some))
                    }
            return [found.get((name.kind, digest_of(name.name))) for name in names]

        by_kind: dict[str, list[str]] = {}
        for name in names:
            by_kind.setdefault(name.kind, []).append(digest_of(name.name))

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

    def sweep(self) -> int:
        """Delete expired state, and return the number of deleted rows."""

        def swept(connection: Connection) -> int:
            old = _RECORD.kept_us < now_us(connection)
            return connection.execute(
                delete(RECORDS).where(_RECORD.owner == self.owner, old)
            ).rowcount

        return self.do(swept)

    def clear(self) -> int:
        mine = delete(RECORDS).where(_RECORD.owner == self.owner)
        return int(self.do(lambda connection: connection.execute(mine).rowcount))

    # --- rows ----------------------------------------------------------------------------

    def _this(self, name: RecordName) -> tuple[Any, ...]:
        digest = digest_of(name.name)
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
        elif not self._inserted(connection, self._row(name, text, kept_us)):
            raise _AnotherWasFirst

    @staticmethod
    def _inserted(connection: Connection, row: dict[str, Any]) -> bool:
        """Insert a row; return False if another transaction has inserted it.

        No statement fails, because that would break a transaction of the user.
        """
        kind = connection.dialect.name
        if kind in ("mysql", "mariadb"):
            ignoring = insert(RECORDS).prefix_with("IGNORE")
            return connection.execute(ignoring, row).rowcount == 1
        dialect: Any = sqlite if kind == "sqlite" else postgresql
        added = dialect.insert(RECORDS).on_conflict_do_nothing().returning(_RECORD.kind)
        return connection.execute(added, row).first() is not None

    def _row(self, name: RecordName, text: str, kept_us: int) -> dict[str, Any]:
        return {
            "owner": self.owner,
            "kind": name.kind,
            "digest": digest_of(name.name),
            "name": name.name.replace("\0", "\ufffd"),
            "text": text,
            "kept_us": kept_us,
        }

"""The state about waiting tasks in the database of a store. Each change is one transaction."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from time import time_ns
from typing import Any

from sqlalchemy import Connection, bindparam, delete, insert, select, update
from sqlalchemy.dialects import postgresql, sqlite

from ..records.interface import (
    Change,
    Decide,
    Publish,
    RecordName,
    Records,
    Snapshot,
    T,
    tried_again,
)
from ..texts import digest_of
from .database import now_us
from .sql_table import LISTED, PARKED, RECORDS, TASKS, short_id

_RECORD, _ROW = RECORDS.c, TASKS.c

#: Stored states that one statement reads.
_LOADED_AT_ONCE = 500

_OURS = _RECORD.owner == bindparam("mine"), _RECORD.kind == bindparam("its")
_THIS = (*_OURS, _RECORD.digest == bindparam("this"))
_THESE = (*_OURS, _RECORD.digest.in_(bindparam("these", expanding=True)))
_READ = select(_RECORD.digest, _RECORD.text, _RECORD.kept_us).where(*_THESE)
#: Locks rows in one order for all processes, so that no two processes wait for each other.
_LOCK = _READ.order_by(_RECORD.digest).with_for_update()
_UPDATE = update(RECORDS).where(*_THIS).values(text=bindparam("new"), kept_us=bindparam("until"))
_DELETE = delete(RECORDS).where(*_THIS)
_MESSAGES = select(_ROW.id, _ROW.next_us, _ROW.state).where(
    _ROW.namespace == bindparam("namespace"), _ROW.task_id == bindparam("task"), LISTED
)


class _AnotherWasFirst(Exception):
    """Another transaction has inserted the row of a state."""


class SqlState(Records):
    """The state of keys, rates and schedules; a change of a key and its row is one transaction."""

    def __init__(self, store: Any) -> None:
        """*store* is an ``SqlStore``."""
        self.where = store.where
        self._store = store
        self._owner = store.namespace if len(store.namespace) <= 64 else digest_of(store.namespace)

    def read(self, name: RecordName) -> Snapshot:
        def looked(connection: Connection) -> Snapshot:
            row = connection.execute(_READ, self._these(name)).first()
            return self._snapshot(connection, row)

        found: Snapshot = self._store.look_up(looked)
        return found

    def change(self, name: RecordName, decide: Decide[T], publish: Publish | None = None) -> T:
        due_us: int | None = None

        def changed(connection: Connection) -> T:
            nonlocal due_us
            row = connection.execute(_LOCK, self._these(name)).first()
            snapshot = self._snapshot(connection, row, locked=True)
            change = decide(snapshot)
            gone = [message for message, _ in snapshot.messages] if change.replaces else []
            if change.look is not None:
                asked = select(_ROW.entry).where(_ROW.id.in_(gone))
                change.look(connection.execute(asked).scalars().all())
            if change.text != snapshot.text:
                self._write(connection, name, change, row is not None)
            if gone:
                connection.execute(delete(TASKS).where(_ROW.id.in_(gone)))
            due_us = change.due_us
            if due_us is not None:
                assert publish is not None
                new = publish(due_us, "", time_ns() // 1000 - now_us(connection))
                connection.execute(self._store.upsert, self._store.row(new))
            return change.answer

        answer = self._done(name, changed)
        if due_us is not None:
            self._store.note_added(due_us)
        return answer

    def claim(self, name: RecordName, *, kept_us: int) -> bool:
        """Store *name* for *kept_us* microseconds; return False if it is stored already."""

        # One statement: of two workers at the same time, the second waits for the first to commit.
        def claimed(connection: Connection) -> bool:
            return self._inserted(connection, name, "1", now_us(connection) + kept_us)

        found: bool = self._store.do_soon(claimed)
        return found

    def change_all(
        self,
        names: Sequence[RecordName],
        decide: Callable[[Sequence[Snapshot]], tuple[Sequence[Change[Any]], T]],
    ) -> T:
        """Change several stored states of one kind in one transaction."""

        def changed(connection: Connection) -> T:
            rows = {row.digest: row for row in connection.execute(_LOCK, self._these(*names))}
            at_us = now_us(connection)
            found = [rows.get(digest_of(name.name)) for name in names]
            texts = [None if row is None or row.kept_us < at_us else row.text for row in found]
            changes, answer = decide([Snapshot(at_us, text) for text in texts])
            for name, row, text, change in zip(names, found, texts, changes, strict=True):
                if row is None or change.text != text:
                    self._write(connection, name, change, row is not None)
            return answer

        return self._done(names[0], changed)

    def load(self, names: Sequence[RecordName]) -> list[str | None]:
        asked = select(_RECORD.kind, _RECORD.digest, _RECORD.text)
        asked = asked.where(_RECORD.owner == self._owner)

        def loaded(connection: Connection) -> list[str | None]:
            valid = asked.where(_RECORD.kept_us >= now_us(connection))
            found: dict[tuple[str, str], str] = {}
            for start in range(0, len(names), _LOADED_AT_ONCE):
                some = names[start : start + _LOADED_AT_ONCE]
                kinds = {name.kind for name in some}
                digests = [digest_of(name.name) for name in some]
                these = _RECORD.kind.in_(kinds), _RECORD.digest.in_(digests)
                rows = connection.execute(valid.where(*these))
                found |= {(kind, digest): text for kind, digest, text in rows}
            return [found.get((name.kind, digest_of(name.name))) for name in names]

        texts: list[str | None] = self._store.look_up(loaded)
        return texts

    def latest(self, kind: str, limit: int) -> tuple[int, list[tuple[str, str]]]:
        asked = select(_RECORD.name, _RECORD.text).order_by(_RECORD.kept_us.desc()).limit(limit)
        asked = asked.where(_RECORD.owner == self._owner, _RECORD.kind == kind)

        def looked(connection: Connection) -> tuple[int, list[tuple[str, str]]]:
            at_us = now_us(connection)
            rows = connection.execute(asked.where(_RECORD.kept_us > at_us))
            return at_us, [(name, text) for name, text in rows]

        found: tuple[int, list[tuple[str, str]]] = self._store.look_up(looked)
        return found

    def sweep(self) -> int:
        """Delete expired state, and return the number of deleted rows."""

        def swept(connection: Connection) -> int:
            ours = delete(RECORDS).where(_RECORD.owner == self._owner)
            return connection.execute(ours.where(_RECORD.kept_us < now_us(connection))).rowcount

        return int(self._store.do_soon(swept))

    def clear(self) -> int:
        ours = delete(RECORDS).where(_RECORD.owner == self._owner)
        return int(self._store.do_soon(lambda connection: connection.execute(ours).rowcount))

    # --- in the caller's transaction -----------------------------------------------------

    def _done(self, name: RecordName, changed: Callable[[Connection], T]) -> T:
        """Call *changed* in a transaction, again if another one has made the row meanwhile."""

        def attempt() -> tuple[T] | None:
            with suppress(_AnotherWasFirst):
                return (self._store.do_soon(changed),)
            return None

        return tried_again(name.name, attempt)[0]

    def _these(self, *names: RecordName) -> dict[str, Any]:
        digests = [digest_of(name.name) for name in names]
        return {"mine": self._owner, "its": names[0].kind, "these": digests}

    def _snapshot(self, connection: Connection, row: Any, *, locked: bool = False) -> Snapshot:
        """Return the state in *row*, and the waiting messages of the task whose id is in *row*."""
        # Ask for the time after locking the row: the lock may have taken a while.
        at_us = now_us(connection)
        if row is None or row.kept_us < at_us:
            return Snapshot(at_us, None)
        task_id = json.loads(row.text).get("id") if row.text.startswith("{") else None
        if task_id is None:
            return Snapshot(at_us, row.text)
        asked = _MESSAGES.with_for_update() if locked else _MESSAGES
        theirs = {"namespace": self._store.namespace, "task": short_id(task_id)}
        messages = tuple(
            (each.id, 0 if each.state == PARKED else each.next_us)
            for each in connection.execute(asked, theirs)
        )
        return Snapshot(at_us, row.text, messages)

    def _write(
        self, connection: Connection, name: RecordName, change: Change[Any], is_there: bool
    ) -> None:
        """Insert, update or delete the row of a stored state. *is_there*: True if it exists."""
        this = {"mine": self._owner, "its": name.kind, "this": digest_of(name.name)}
        if change.text is None:
            connection.execute(_DELETE, this)
        elif is_there:
            connection.execute(_UPDATE, this | {"new": change.text, "until": change.kept_us})
        elif not self._inserted(connection, name, change.text, change.kept_us):
            raise _AnotherWasFirst

    def _inserted(self, connection: Connection, name: RecordName, text: str, kept_us: int) -> bool:
        """Insert a row; return False if another transaction has inserted it.

        No statement fails, because that would break a transaction of the user.
        """
        row = {
            "owner": self._owner,
            "kind": name.kind,
            "digest": digest_of(name.name),
            "name": name.name.replace("\0", "\ufffd"),
            "text": text,
            "kept_us": kept_us,
        }
        kind = connection.dialect.name
        if kind in ("mysql", "mariadb"):
            ignoring = insert(RECORDS).prefix_with("IGNORE")
            return connection.execute(ignoring, row).rowcount == 1
        dialect: Any = sqlite if kind == "sqlite" else postgresql
        added = dialect.insert(RECORDS).on_conflict_do_nothing().returning(_RECORD.kind)
        return connection.execute(added, row).first() is not None

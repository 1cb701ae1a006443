"""Records of keys in a store, beside the messages that wait: one transaction changes both."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from time import time_ns

from sqlalchemy import Connection, bindparam, delete, exc, select, update
from sqlalchemy.exc import SQLAlchemyError

from ...errors import StoreUnavailable
from ...keyed.record import Record
from ...keyed.records import KeyRecords
from ...keyed.rules import InBroker, Rule, Seen, Step
from ...records.database import now_us
from ...records.interface import RecordName, tried_again
from ..virtual.waiting import waiting_of
from .delays import Put
from .schema import MESSAGES
from .store import ADD, Store, is_about_a_row, reason_of

_ROW = MESSAGES.c
#: Messages of the task that stands. Their envelopes only where one has to look into them.
_SEE = select(_ROW.id, _ROW.due_us).where(
    _ROW.namespace == bindparam("mine"), _ROW.task_id == bindparam("task")
)
_SEE_LOCKED = _SEE.with_for_update()
_ENVELOPE = select(_ROW.envelope).where(_ROW.id == bindparam("one"))
_TAKE_OUT = delete(MESSAGES).where(_ROW.id == bindparam("one"))
#: A new message in the place of another one; the row stays.
_PUT_IN_PLACE = (
    update(MESSAGES)
    .where(_ROW.id == bindparam("one"))
    .values(
        queue=bindparam("queue_"),
        envelope=bindparam("envelope_"),
        due_us=bindparam("due"),
        task_id=bindparam("task"),
        attempts=0,
        reason=None,
    )
)


class StoreKeyRecords(KeyRecords):
    """Records in one *store*, for any thread. Every method raises StoreUnavailable."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._records = store.records

    def read(self, name: str) -> Seen:
        self._make()
        return self._store.look(lambda connection: self._seen(connection, name)[0])

    def change(
        self, name: str, rule: Rule, put: Callable[[int], Put] | None = None
    ) -> tuple[Seen, Step]:
        self._make()

        def attempt() -> tuple[Seen, Step] | None:
            try:
                return self._store.change(partial(self._change, name, rule, put))
            except StoreUnavailable as error:
                # Another was the first to write this record, at the same time.
                if isinstance(error.__cause__, exc.IntegrityError):
                    return None
                self._records.is_ready = is_about_a_row(error)
                raise

        seen, step = tried_again(name, attempt)
        if step.due_us is not None:
            self._store.on_add(step.due_us)
        return seen, step

    def _change(
        self, name: str, rule: Rule, put: Callable[[int], Put] | None, connection: Connection
    ) -> tuple[Seen, Step]:
        seen, is_there = self._seen(connection, name, to_change=True)
        step = rule(seen)
        if step.due_us is None and step.record == seen.record:
            return seen, step
        text = None if step.record is None else step.record.encoded()
        self._records.write_row(connection, RecordName("key", name), text, step.kept_us, is_there)
        if step.due_us is None:
            return seen, step
        assert put is not None
        queue, due_us, task_id, envelope = put(step.due_us)
        row = self._store.row(queue, envelope, due_us, task_id)
        if step.replaces and len(seen.waiting) == 1:
            new = {"queue_": queue, "envelope_": envelope, "due": due_us, "task": row["task_id"]}
            connection.execute(_PUT_IN_PLACE, {"one": seen.waiting[0].place, **new})
            return seen, step
        if step.replaces:
            for each in seen.waiting:
                connection.execute(_TAKE_OUT, {"one": each.place})
        connection.execute(ADD, row)
        return seen, step

    def _seen(
        self, connection: Connection, name: str, *, to_change: bool = False
    ) -> tuple[Seen, bool]:
        """The record of *name* and what waits for it, locked *to_change* them; is a row there?"""
        found = self._records.read_row(connection, RecordName("key", name), locked=to_change)
        # Asked for after the lock: another may have held it for a while.
        at_us = now_us(connection)
        if found is None:
            return Seen(at_us, None), False
        text, kept_us = found
        if kept_us < at_us:
            return Seen(at_us, None), True
        record = Record.decoded(text)
        if record.id is None:
            return Seen(at_us, record), True
        mine = {"mine": self._store.namespace, "task": record.id[:255]}
        rows = connection.execute(_SEE_LOCKED if to_change else _SEE, mine).all()
        waiting = tuple(
            InBroker(row_id, due_us or 0)
            for row_id, due_us in rows
            if due_us == record.due_us or not _is_cancelled(connection, row_id)
        )
        return Seen(at_us, record, waiting), True

    def _make(self) -> None:
        self._store.prepare()
        if self._records.is_ready:
            return
        try:
            self._records.make_tables()
        except SQLAlchemyError as error:
            raise StoreUnavailable(f"{self._store.shown_url}: {reason_of(error)}") from error


def _is_cancelled(connection: Connection, row_id: int) -> bool:
    """True for a message, due at another time than its key says, that is to be announced."""
    envelope = connection.execute(_ENVELOPE, {"one": row_id}).scalar_one()
    return waiting_of(envelope, queue="", due_us=time_ns() // 1000) is None

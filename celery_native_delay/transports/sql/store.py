"""A database table of waiting messages.

:class:`Store` is thread-safe. After a fork, the child process opens a new ``Store``. Several
processes may move due messages at once: PostgreSQL and MySQL skip locked rows, and SQLite locks the
whole file.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, bindparam, delete, func, insert, inspect, select

from ...errors import NativeDelayError, StoreUnavailable
from ...now import time_ns
from ...per_process import PerProcess
from ...records.database import Database
from ...records.interface import Change, RecordName, Snapshot
from ..virtual.status import Census
from ..virtual.watching import SHOWN_SECONDS
from .records import StoreRecords
from .rows import DUE, PARKED, DispatchBatch
from .schema import MESSAGES, METADATA

logger = logging.getLogger(__name__)

_ROW = MESSAGES.c

ADD = insert(MESSAGES)
_NEXT = select(func.min(_ROW.due_us)).where(_ROW.namespace == bindparam("mine"))

#: The record that shows that a dispatcher is running. It expires unless the dispatcher renews it.
_DISPATCHING = RecordName("sign", "dispatching")

#: The stores of the parent process after a fork. They are kept here, because freeing them in the
#: child would close the parent's connections.
_inherited: list[Store] = []

_stores: PerProcess[tuple[str, str], Store] = PerProcess(_inherited.append)


class Store(Database):
    """The waiting messages of one ``native_delay_namespace`` in a database."""

    tables = METADATA

    def __init__(self, url: str, namespace: str) -> None:
        super().__init__(url, setting="native_delay_store")
        self.namespace = namespace
        self._mine = _ROW.namespace == namespace
        #: A function that is called with the due time of each message that this process stores.
        self.on_add: Callable[[int], object] = lambda due_us: None
        #: Messages that were delivered and could not be deleted: hashes of envelopes, by id.
        self.delivered_but_kept: dict[int, int] = {}

    @classmethod
    def of(cls, url: str, namespace: str) -> Store:
        """Return this process's :class:`Store` for the database at *url*."""
        return _stores.get((url, namespace), lambda: cls._made(url, namespace))

    @classmethod
    def _made(cls, url: str, namespace: str) -> Store:
        store = cls(url, namespace)
        if store.is_file and not Path(store.path).is_absolute():
            logger.warning(
                "native delay: %s is another file for each folder that a process starts in: "
                "name it with four slashes, as in sqlite:////var/lib/shop/delays.db",
                store.where,
            )
        return store

    @classmethod
    def forget(cls, url: str, namespace: str) -> None:
        """Close this process's connections to the database at *url*."""
        store = _stores.forget((url, namespace))
        if store is not None:
            store.engine.dispose()

    @property
    def is_file(self) -> bool:
        return self.engine.dialect.name == "sqlite"

    @property
    def path(self) -> str:
        """Return the path of the SQLite file; call this only if :attr:`is_file` is True."""
        return (self.engine.url.database or "").removeprefix("file:")

    @cached_property
    def records(self) -> StoreRecords:
        """Return the storage for task state, such as debounce keys, in this database."""
        return StoreRecords(self)

    # --- the tables ----------------------------------------------------------------------

    def prepare(self) -> None:
        """Create missing tables at the first call; raise StoreUnavailable if this fails."""
        if not self.is_ready:
            self.do(lambda connection: None)

    def is_made(self) -> bool:
        if self.is_file and not Path(self.path).exists():
            return False  # connecting would create the file
        with self.explained(), self.engine.connect() as connection:
            found = inspect(connection)
            return all(found.has_table(table.name) for table in self.tables.sorted_tables)

    def _unavailable(self, reason: str) -> NativeDelayError:
        return StoreUnavailable(f"the store {self.where} cannot be used: {reason}")

    # --- in ------------------------------------------------------------------------------

    def add(self, queue: str, envelope: str, *, due_us: int, task_id: str) -> None:
        """Insert a message (*envelope*, kombu's JSON) for *queue*, and commit."""
        values = self.row(queue, envelope, due_us, task_id)
        self.do(lambda connection: connection.execute(ADD, values))
        self.on_add(due_us)

    def row(self, queue: str, envelope: str, due_us: int, task_id: str) -> dict[str, Any]:
        return {
            "namespace": self.namespace,
            "due_us": due_us,
            "queue": queue,
            "envelope": envelope,
            "task_id": task_id[:255],
        }

    # --- out -----------------------------------------------------------------------------

    def next_due_us(self) -> int | None:
        """Return the earliest due time (µs since the epoch), or None if no message waits."""
        mine = {"mine": self.namespace}
        due_us = self.look_up(lambda connection: connection.execute(_NEXT, mine).scalar())
        return None if due_us is None else int(due_us)

    def taking(self, *, until_us: int) -> AbstractContextManager[DispatchBatch]:
        """Lock a batch of messages that are due at *until_us*, for a ``with`` block.

        At the end of the block, the same transaction deletes delivered messages and updates
        undelivered messages.
        """
        return self._batch(DUE, {"mine": self.namespace, "until": until_us})

    def taking_parked(self, *, after_id: int) -> AbstractContextManager[DispatchBatch]:
        """Lock a batch of parked (undeliverable) messages with ids above *after_id*."""
        return self._batch(PARKED, {"mine": self.namespace, "after": after_id})

    @contextmanager
    def _batch(self, which: Any, parameters: dict[str, Any]) -> Iterator[DispatchBatch]:
        with self.explained(), self.engine.begin() as connection:
            batch = DispatchBatch(connection, list(connection.execute(which, parameters)))
            yield batch
            batch.settle()
        for one in batch.delivered:
            self.delivered_but_kept.pop(one, None)

    # --- the heartbeat of a dispatcher --------------------------------------------------------

    def show_dispatching(self) -> None:
        """Write the heartbeat that shows that this process moves due messages."""

        def renewed(seen: Snapshot) -> Change[None]:
            return Change(str(seen.now_us), seen.now_us + SHOWN_SECONDS * 1_000_000, None)

        self.records.change(_DISPATCHING, renewed)

    def _is_shown(self) -> bool:
        """Return True if any process that moves due messages has a fresh heartbeat."""
        return self.records.read(_DISPATCHING).text is not None

    # --- looking -------------------------------------------------------------------------

    def census(self) -> Census:
        now_us = time_ns() // 1000
        columns = (func.count(_ROW.due_us), func.count(_ROW.id), func.min(_ROW.due_us))
        late = select(func.count()).select_from(MESSAGES).where(self._mine, _ROW.due_us <= now_us)

        def counted(connection: Connection) -> tuple[Any, Any]:
            counts = connection.execute(select(*columns).where(self._mine)).one()
            return counts, connection.execute(late).scalar()

        (waiting, total, first_us), overdue = self.look_up(counted)
        until_first_us = None if first_us is None else int(first_us) - now_us
        parked = int(total) - int(waiting)
        return Census(int(waiting), parked, int(overdue or 0), until_first_us, self._is_shown())

    def look_for_dispatcher(self) -> Census:
        """Check quickly if messages are overdue, and if a process moves due messages.

        In the result, the counts ``waiting`` and ``overdue`` are at most 1: 1 means one or more
        messages. ``parked`` is always 0.
        """
        due_us = self.next_due_us()
        until_us = None if due_us is None else due_us - time_ns() // 1000
        overdue = until_us is not None and until_us <= 0
        return Census(int(due_us is not None), 0, int(overdue), until_us, self._is_shown())

    def count_parked(self) -> int:
        parked = _ROW.due_us.is_(None)
        statement = select(func.count()).select_from(MESSAGES).where(self._mine, parked)
        return int(self.look_up(lambda connection: connection.execute(statement).scalar()) or 0)

    def parked(self, *, limit: int) -> list[str]:
        """Return up to *limit* due but undeliverable messages, as kombu's JSON."""
        parked = select(_ROW.envelope).where(self._mine, _ROW.due_us.is_(None))
        statement = parked.order_by(_ROW.id).limit(limit)
        return self.look_up(lambda connection: list(connection.execute(statement).scalars()))

    def purge(self, *, parked: bool) -> int:
        """Delete all undeliverable messages if *parked* is True, otherwise all waiting messages."""
        which = _ROW.due_us.is_(None) if parked else _ROW.due_us.is_not(None)
        statement = delete(MESSAGES).where(self._mine, which)
        return self.do(lambda connection: connection.execute(statement).rowcount)

"""The transaction of a SQLAlchemy session or connection of the user."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from sqlalchemy import Connection, event, exc
from sqlalchemy.orm import Session

from ..errors import CannotDelay
from .joined import UsersTransaction, outside_transaction
from .sql_table import TASKS, table_name, tables_named

T = TypeVar("T")

#: The item of a session's ``info`` with our transactions that it tells of its end.
_WATCHING = "native_delay_watching"


class SessionTransaction(UsersTransaction):
    """The transaction of a Session, an AsyncSession or a Connection."""

    def __init__(self, session: Any, dialect: str, table_prefix: str) -> None:
        """*dialect* is the kind of the store's database; its tables begin with *table_prefix*."""
        super().__init__()
        self._session = getattr(session, "sync_session", session)
        if not isinstance(self._session, Session | Connection):
            raise TypeError(
                f"expected a Session, an AsyncSession or a Connection of SQLAlchemy 2, got "
                f"{session!r}"
            )
        #: Calls that follow the commit. After a rollback they do no harm.
        self._calls: list[Callable[[], object]] = []
        self._is_in_block = True
        self._table_prefix = table_prefix
        self._check(dialect, table_name(table_prefix, TASKS.name))

    def do(self, work: Callable[[Any], T]) -> T:
        connection = self._connection()
        with tables_named(connection, self._table_prefix):
            return work(connection)

    def after_commit(self, call: Callable[[], object]) -> None:
        if not self._calls or self._calls[-1] != call:
            self._calls.append(call)

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Make the calls when a transaction of the session ends, in the block or after it."""
        watching: list[SessionTransaction] = []
        if isinstance(self._session, Session):
            if _WATCHING not in self._session.info:  # a listener cannot remove itself
                event.listen(self._session, "after_transaction_end", _ended)
            watching = self._session.info.setdefault(_WATCHING, watching)
        watching.append(self)
        try:
            yield
        finally:
            # A transaction that ends later makes the calls then.
            is_open = self._session.in_transaction()
            self._is_in_block = False
            if not is_open:
                watching.remove(self)
        if not is_open:
            self._call()

    def _call(self) -> None:
        calls, self._calls = self._calls, []
        with outside_transaction():  # else the relay's changes would need the user's next commit
            for call in calls:
                call()

    def _connection(self) -> Connection:
        found: Connection = self._session
        if isinstance(self._session, Session):
            try:
                found = self._session.connection()
            except exc.MissingGreenlet as error:
                raise CannotDelay(
                    "expected a function that `await session.run_sync(function)` calls: only there "
                    "an AsyncSession can write"
                ) from error
        return found

    def _check(self, dialect: str, table: str) -> None:
        if isinstance(self._session, Session) and not self._session.is_active:
            raise CannotDelay(
                "expected a transaction that can commit, got one that has failed: roll the session "
                "back first"
            )
        connection = self._connection()
        # The level of create_engine() is known to the dialect alone.
        level = connection.get_execution_options().get("isolation_level") or getattr(
            connection.dialect, "_on_connect_isolation_level", None
        )
        if level == "AUTOCOMMIT":
            raise CannotDelay(
                "expected a transaction, got a connection with the isolation level AUTOCOMMIT: it "
                "commits each statement by itself"
            )
        theirs = connection.dialect
        if theirs.name != dialect or not theirs.has_table(connection, table):
            raise CannotDelay(
                f"expected a transaction of the {dialect} database in native_delay_store, got one "
                f"of {connection.engine.url.render_as_string()}, which has no table {table}"
            )


def _ended(session: Session, transaction: Any) -> None:
    """Make the calls of our transactions, as a transaction of *session* has ended."""
    if transaction.parent is not None:
        return
    watching: list[SessionTransaction] = session.info.get(_WATCHING, [])
    for each in tuple(watching):
        if not each._is_in_block:
            watching.remove(each)
        each._call()

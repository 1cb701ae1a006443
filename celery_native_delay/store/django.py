"""A store in the database of a Django project, through Django's own connections."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from time import sleep
from types import SimpleNamespace
from typing import Any, TypeVar

from django.conf import settings
from django.core.exceptions import ImproperlyConfigured
from django.db import DataError, Error, IntegrityError, OperationalError, connections, transaction
from sqlalchemy import Connection, Dialect, Engine, create_engine
from sqlalchemy.pool import NullPool

from ..errors import (
    CannotDelay,
    NativeDelayError,
    SettingsError,
    StoreUnavailable,
    UnsupportedBroker,
)
from ..per_process import in_forked_children
from ..urls import EXPECTED_TABLE_PREFIX, TABLE_PREFIX, is_table_prefix
from ..within import Within, before_commit
from .joined import UsersTransaction, is_outside
from .sql import SqlStore
from .sql_table import naming_tables, schema

T = TypeVar("T")

#: SQLAlchemy's dialects for the modules that Django connects with.
_DIALECTS = {
    "psycopg": "postgresql+psycopg",
    "psycopg2": "postgresql+psycopg2",
    "MySQLdb": "mysql+mysqldb",
    "pymysql": "mysql+pymysql",
    "sqlite3": "sqlite",
    "sqlite3.dbapi2": "sqlite",
}

#: Attempts of a transaction of our own that conflicts with another one, and the pause in seconds.
_TRIES = 6
_PAUSE_SECONDS = 0.05

#: The attribute of Django's connection that keeps the user's transaction, by namespace.
_KEPT = "_native_delay_transactions"


#: Connections of the parent process. Freeing them would close them.
_inherited: list[Any] = []


class DjangoStore(SqlStore):
    """The waiting tasks of one namespace in a database of Django's ``DATABASES``."""

    def __init__(
        self, url: str, namespace: str, *, timeout_seconds: float, joins: bool = True
    ) -> None:
        self.alias = url.partition(":")[2] or "default"
        self._joins = joins
        # For the dialect alone: all statements run on Django's connections.
        try:
            is_known = self.alias in connections
        except ImproperlyConfigured as exc:
            raise UnsupportedBroker(
                f"native_delay_store={url!r} needs Django's settings: set DJANGO_SETTINGS_MODULE, "
                f"or call settings.configure(), before tasks are sent"
            ) from exc
        if not is_known:
            raise UnsupportedBroker(
                f"expected native_delay_store={url!r} to name one of Django's databases "
                f"{sorted(connections)}: correct the name after the colon"
            )
        engine = _engine_for(connections[self.alias])
        super().__init__(url, namespace, timeout_seconds=timeout_seconds, engine=engine)
        self.table_prefix = table_prefix()
        self.tables = schema(self.table_prefix)
        # Django's connections belong to their threads, and have time limits of their own.
        self._within = None
        self._apart = Within(timeout_seconds, rolls_back=True)
        self.where = f"Django's database {self.alias!r}"
        in_forked_children(self._leave_to_parent)

    def _leave_to_parent(self) -> None:
        """Forget the parent's connection in a forked child, as Celery does in its own children."""
        connection = connections[self.alias]
        vars(connection).pop(_KEPT, None)  # with its token
        if connection.connection is not None and not connection.in_atomic_block:
            _inherited.append(connection.connection)
            connection.connection = None

    def users(self) -> UsersTransaction | None:
        if (of_sqlalchemy := super().users()) is not None:
            return of_sqlalchemy
        connection = connections[self.alias]
        if not self._joins or is_outside() or not _is_in_transaction(connection):
            return None
        kept: dict[str, UsersTransaction] = vars(connection).setdefault(_KEPT, {})
        if self.namespace not in kept:
            self._check_made()
            kept[self.namespace] = _Atomic(self)
        return kept[self.namespace]

    @property
    def has_one_transaction(self) -> bool:  # type: ignore[override]
        return self._joins

    def one_transaction(self) -> AbstractContextManager[Any]:
        found: AbstractContextManager[Any] = transaction.atomic(using=self.alias)
        return found

    def do(self, work: Callable[[Connection], T]) -> T:
        if (users := self.users()) is not None:
            return users.do(work)
        if not _is_in_transaction(connections[self.alias]):
            return self._alone(work)
        try:  # a thread has a connection of its own
            return self._apart(lambda: self._apart_alone(work))
        except TimeoutError as exc:
            raise self._unavailable(str(exc)) from exc

    def _apart_alone(self, work: Callable[[Connection], T]) -> T:
        try:
            return self._alone(work)
        finally:
            connections[self.alias].close_if_unusable_or_obsolete()

    def _alone(self, work: Callable[[Connection], T]) -> T:
        """Call *work* in a transaction of its own, which is repeated after a conflict.

        A connection that the server has closed is replaced. Any other stays open: it may have
        locks, cursors and temporary tables of the user.
        """
        with self._borrowed() as connection:
            return self._tried_on(connection, work)

    @contextmanager
    def _borrowed(self) -> Iterator[Any]:
        """Yield this thread's connection. One that was not open goes back to Django's pool.

        Such a pool has 4 connections by default, and a worker more threads.
        """
        connection = connections[self.alias]
        was_open = connection.connection is not None
        try:
            yield connection
        finally:
            if not was_open and getattr(connection, "pool", None) is not None:
                connection.close()

    def _tried_on(self, connection: Any, work: Callable[[Connection], T]) -> T:
        if connection.connection is not None and not connection.is_usable():
            connection.close()
        for tries_left in reversed(range(_TRIES)):
            try:
                with transaction.atomic(using=self.alias):
                    result = work(self.on(connection))
                    before_commit()
                    return result
            except DataError as exc:
                raise CannotDelay(f"{self.where} refuses the task: {exc}") from exc
            except (IntegrityError, OperationalError) as exc:
                is_lost = connection.connection is None or not connection.is_usable()
                if is_lost:
                    raise self._unavailable(str(exc)) from exc
                if not tries_left:
                    raise self._refused(exc) from exc
                sleep(_PAUSE_SECONDS)
            except Error as exc:
                raise self._refused(exc) from exc
        raise AssertionError("unreachable")

    def _refused(self, error: Error) -> NativeDelayError:
        self.is_ready = False
        self._check_made()
        return self._unavailable(str(error))

    look_up = do

    def on(self, connection: Any) -> Connection:
        """Return a SQLAlchemy connection that runs its statements by cursors of Django's."""
        # Only Django begins, commits and rolls back.
        nothing = dict.fromkeys(("commit", "rollback", "close"), lambda: None)
        dbapi: Any = SimpleNamespace(cursor=connection.cursor, is_valid=True, **nothing)
        return Connection(self.engine, connection=dbapi, _allow_autobegin=False)

    def leave_thread(self) -> None:
        connections[self.alias].close()  # else a pool of Django's would miss it

    def prepare(self) -> None:
        self._check_made()

    def is_made(self) -> bool:
        self.is_ready = self.is_ready or set(self.tables.tables) <= set(self.table_names())
        return self.is_ready

    def table_names(self) -> list[str]:
        try:
            with self._borrowed() as connection, connection.cursor() as cursor:
                found: list[str] = connection.introspection.table_names(cursor)
        except Error as exc:
            raise self._unavailable(str(exc)) from exc
        return found

    _prefix_setting = "DELAY_TABLE_PREFIX"

    @property
    def _way_to_tables(self) -> str:  # type: ignore[override]
        return (
            f"add 'celery_native_delay.django' to INSTALLED_APPS, and run `python manage.py "
            f"migrate --database {self.alias}`"
        )

    def _check_made(self) -> None:
        if not self.is_made():
            raise StoreUnavailable(": ".join(self.not_made()))


def _is_in_transaction(connection: Any) -> bool:
    """Return True in ``atomic``, and after ``set_autocommit(False)``. Connects to nothing."""
    is_open = connection.connection is not None
    return bool(connection.in_atomic_block or (is_open and not connection.autocommit))


def _engine_for(connection: Any) -> Engine:
    module = connection.Database.__name__
    if module not in _DIALECTS:
        raise UnsupportedBroker(
            f"expected the database {connection.alias!r} of Django to be PostgreSQL, MySQL, "
            f"MariaDB or SQLite, got the driver {module}: set native_delay_store to another "
            f"database"
        )
    # Django's cursors expect "%s" on SQLite, too.
    style = {"paramstyle": "format"} if connection.vendor == "sqlite" else {}
    engine = create_engine(f"{_DIALECTS[module]}://", poolclass=NullPool, **style)
    return naming_tables(engine, table_prefix())


def table_prefix() -> str:
    """Return Django's setting DELAY_TABLE_PREFIX. Raises SettingsError if it is invalid."""
    found = getattr(settings, "DELAY_TABLE_PREFIX", TABLE_PREFIX)
    if not is_table_prefix(found):
        raise SettingsError(
            f"expected DELAY_TABLE_PREFIX in Django's settings to have "
            f"{EXPECTED_TABLE_PREFIX}, got {found!r}"
        )
    return str(found)


def dialect_of(connection: Any) -> Dialect:
    """Return SQLAlchemy's dialect for a connection of Django's. Raises UnsupportedBroker."""
    return _engine_for(connection).dialect


class _Atomic(UsersTransaction):
    """The transaction that is open on Django's connection of this thread."""

    def __init__(self, store: DjangoStore) -> None:
        super().__init__()
        self._store = store

    def do(self, work: Callable[[Any], T]) -> T:
        return work(self._store.on(connections[self._store.alias]))

    def after_commit(self, call: Callable[[], object]) -> None:
        # After set_autocommit(False) Django tells no commit, and a worker publishes the rows.
        if connections[self._store.alias].in_atomic_block:
            transaction.on_commit(call, using=self._store.alias)

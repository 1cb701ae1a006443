"""The connections to the database of a store, and transactions that end in time."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from time import monotonic, time
from typing import Any, TypeVar

from sqlalchemy import (
    URL,
    Connection,
    Engine,
    Inspector,
    create_engine,
    event,
    exc,
    inspect,
    make_url,
    text,
)

from ..errors import NativeDelayError, SettingsError, StoreUnavailable
from ..now import time_ns
from ..urls import TABLE_PREFIX, table_prefix_of, without_password
from ..within import Within, before_commit
from .joined import UsersTransaction, joined, transaction_with
from .sessions import SessionTransaction
from .sql_table import naming_tables, other_prefix, schema

logger = logging.getLogger(__name__)

T = TypeVar("T")

#: Attempts of one transaction: another process may create the tables, or write the same row.
_TRIES = 6

#: An attempt that took longer than this, in seconds, is not repeated.
_QUICK_SECONDS = 2.0

#: Values of our option ``synchronous`` in a SQLite URL, in lower case. The first is the default.
SYNCHRONOUS = ("normal", "full")

#: Milliseconds to wait while another process writes to the same SQLite file.
_BUSY_MS = 5_000

#: Options of drivers that end a call, in its thread, whose packets are lost. By default, it would
#: hold its thread and its connection for up to two hours.
_LIBPQ = {"keepalives_idle": 10, "keepalives_interval": 5, "keepalives_count": 3}
_LIBPQ["tcp_user_timeout"] = 30_000
_MYSQL: dict[str, Any] = {"read_timeout": 30, "write_timeout": 30}
#: A thread waits no longer for a row that another session has locked.
_MYSQL["init_command"] = "SET SESSION innodb_lock_wait_timeout = 5"
#: Milliseconds for which a transaction waits for a row that another session has locked, and for
#: its own process, which may be cut off or frozen. In one round trip.
_LIMITS = "SET LOCAL lock_timeout = 5000; SET LOCAL idle_in_transaction_session_timeout = 30000"
_LOST = {"psycopg": _LIBPQ, "psycopg2": _LIBPQ, "pymysql": _MYSQL, "mysqldb": _MYSQL}

#: An execution option of connections that only read, for which SQLite needs no write lock.
READS = "native_delay_reads"


def engine_of(url: str) -> Engine:
    """Make a SQLAlchemy engine for *url*. Raises SettingsError if the driver is missing."""
    try:
        place = make_url(url).difference_update_query(["native_delay_prefix"])
    except (exc.ArgumentError, ValueError) as error:
        raise SettingsError(
            f"expected native_delay_store to be a URL of SQLAlchemy such as "
            f"sqlite:////var/lib/shop/delays.db, got {without_password(url)!r}"
        ) from error
    try:
        if place.get_backend_name() == "sqlite":
            engine = _sqlite(place)
        else:  # pool_pre_ping notices a connection that the server has closed
            engine = create_engine(place, pool_pre_ping=True, **_of_servers(place))
    except (exc.ArgumentError, ImportError) as error:
        raise SettingsError(
            f"native_delay_store {without_password(url)!r} cannot be used: {error}"
        ) from error
    return naming_tables(engine, table_prefix_of(url) or TABLE_PREFIX)


def _of_servers(place: URL) -> dict[str, Any]:
    """Return engine options for PostgreSQL, MySQL and MariaDB, or {} for another database."""
    if place.get_backend_name() not in ("postgresql", "mysql", "mariadb"):
        return {}
    # A producer waits at most 5 seconds for a server that does not answer.
    patience = {"connect_timeout": 5} | _LOST.get(place.get_driver_name(), {})
    patience = {name: value for name, value in patience.items() if name not in place.query}
    # A stricter isolation level, which a database may have as its default, can refuse the commit of
    # a dispatcher that has already put messages into queues.
    return {"connect_args": patience, "isolation_level": "READ COMMITTED"}


def _sqlite(place: URL) -> Engine:
    mode = place.query.get("synchronous", SYNCHRONOUS[0])
    if str(mode).lower() not in SYNCHRONOUS:
        raise SettingsError(f"expected synchronous=normal or full in the store's URL, got {mode!r}")
    engine = create_engine(place.difference_update_query(["synchronous"]))
    file = Path(place.database or "").absolute()

    @event.listens_for(engine, "connect")
    def prepare(connection: Any, record: Any) -> None:
        connection.isolation_level = None  # we begin transactions ourselves
        connection.execute(f"PRAGMA busy_timeout = {_BUSY_MS}")
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute(f"PRAGMA synchronous = {mode}")
        record.info["file"] = _identity(file)

    @event.listens_for(engine, "checkout")
    def notice_another_file(connection: Any, record: Any, proxy: Any) -> None:
        # SQLite would keep writing to a file that was removed or replaced.
        if record.info.get("file") != _identity(file):
            raise exc.DisconnectionError(f"{file} was removed or replaced since it was opened")

    @event.listens_for(engine, "begin")
    def begin(connection: Any) -> None:
        # BEGIN IMMEDIATE takes the write lock at once. Otherwise a transaction that reads and then
        # writes fails if another transaction wrote meanwhile.
        reads = connection.get_execution_options().get(READS)
        # exec_driver_sql() would take as long as the insert that follows.
        connection.connection.dbapi_connection.execute("BEGIN" if reads else "BEGIN IMMEDIATE")

    return engine


def limit_waits(connection: Connection) -> None:
    """Let a statement of this transaction fail if another session locks its rows for 5 s.

    If this process is cut off or frozen, PostgreSQL rolls the transaction back after 30 s, and
    frees the rows that it has locked: by default only when it notices the lost connection, after
    two hours. On MySQL all transactions have the first limit, and none the second. On PostgreSQL
    the limits cost a round trip.
    """
    if connection.dialect.name == "postgresql":
        connection.exec_driver_sql(_LIMITS)


# unix_timestamp(now()) is an hour wrong in the hour that a local time zone repeats in autumn.
_MYSQL_TIME = text("SELECT timestampdiff(MICROSECOND, '1970-01-01', utc_timestamp(6)) * 0.000001")

#: The statement that asks a server for its time, in seconds since the epoch.
_TIMES = {
    "postgresql": text("SELECT extract(epoch FROM clock_timestamp())"),
    "mysql": _MYSQL_TIME,
    "mariadb": _MYSQL_TIME,
}


def now_us(connection: Connection) -> int:
    """Return the database server's time in microseconds since the epoch."""
    statement = _TIMES.get(connection.dialect.name)
    if statement is None:  # SQLite uses this machine's clock
        return time_ns() // 1000
    return int(connection.execute(statement).scalar_one() * 1_000_000)


def clock_ahead_seconds(connection: Connection) -> float | None:
    """Return how many seconds the database server's clock is ahead of this machine's clock."""
    if connection.dialect.name == "sqlite":
        return 0.0  # it uses this machine's clock
    statement = _TIMES.get(connection.dialect.name)
    if statement is None:
        return None
    before = time()
    told = float(connection.execute(statement).scalar_one())
    return told - (before + time()) / 2


def _identity(file: Path) -> tuple[int, int] | None:
    try:
        found = file.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino


class Database:
    """A thread-safe connection pool for a database; creates missing tables on first use."""

    def __init__(self, url: str, *, timeout_seconds: float, engine: Engine | None = None) -> None:
        self.url = url
        self.where = without_password(url)
        self.table_prefix = table_prefix_of(url) or TABLE_PREFIX
        self.tables = schema(self.table_prefix)
        self.engine = engine or engine_of(url)
        self.is_file = self.engine.dialect.name == "sqlite"
        #: True once the tables were created or found.
        self.is_ready = False
        #: None for SQLite, whose own time limit is enough.
        self._within = None if self.is_file else Within(timeout_seconds, rolls_back=True)

    def prepare(self) -> None:
        if not self.is_ready:
            self.do(lambda connection: None)

    def close(self) -> None:
        self.engine.dispose()

    def users(self) -> UsersTransaction | None:
        return transaction_with(self)

    @contextmanager
    def joining(self, session: Any) -> Iterator[None]:
        self.prepare()
        transaction = SessionTransaction(session, self.engine.dialect.name, self.table_prefix)
        with joined(self, transaction), transaction.watched():
            yield

    def do(self, work: Callable[[Connection], T]) -> T:
        """Call the function *work* in a transaction, which is repeated after a conflict."""
        if (users := self.users()) is not None:
            return users.do(work)
        return self._in_time(lambda: self._tried(self.engine.begin, work))

    def do_soon(self, work: Callable[[Connection], T]) -> T:
        """Call *work* as :meth:`do` does; fail soon if another session has locked its row.

        If this process is cut off or frozen meanwhile, it keeps no row locked for long.
        """
        if self.users() is not None:  # the user's transaction has limits of its own
            return self.do(work)

        def limited(connection: Connection) -> T:
            limit_waits(connection)
            return work(connection)

        return self.do(limited)

    def look_up(self, work: Callable[[Connection], T]) -> T:
        """Call the function *work* in a read-only transaction, and return the result."""
        if (users := self.users()) is not None:
            return users.do(work)

        def connect() -> Connection:
            return self.engine.connect().execution_options(**{READS: True})

        return self._in_time(lambda: self._tried(connect, work))

    def _in_time(self, call: Callable[[], T]) -> T:
        if self._within is None:
            return call()
        try:
            return self._within(call)
        except TimeoutError as error:
            raise self._unavailable(str(error)) from error

    def _unavailable(self, reason: str) -> NativeDelayError:
        return StoreUnavailable(f"the store at {self.where} does not work: {reason}")

    def is_made(self) -> bool:
        """Return True if the tables exist. This call creates nothing, not even SQLite's file."""
        return self._inspected(lambda seen: all(map(seen.has_table, self.tables.tables)), False)

    def table_names(self) -> list[str]:
        """Return the names of the tables in the database."""
        return self._inspected(lambda seen: seen.get_table_names(), [])

    def _inspected(self, question: Callable[[Inspector], T], without_file: T) -> T:
        path = Path((self.engine.url.database or "").removeprefix("file:").partition("?")[0])
        if self.is_file and not path.exists():
            return without_file

        def inspected() -> T:
            with self.explained(), self.engine.connect() as connection:
                return question(inspect(connection))

        return self._in_time(inspected)

    def not_made(self) -> tuple[str, str]:
        """Return the problem and the remedy if the tables do not exist."""
        problem = f"{self.where} has no tables {' and '.join(self.tables.tables)}"
        prefix = other_prefix(self.table_prefix, self.table_names())
        if prefix is None:
            return problem, self._way_to_tables
        return f"{problem}, but {prefix}task and {prefix}record", (
            f'rename those, or set {self._prefix_setting} to "{prefix}" again, in workers and '
            f"producers"
        )

    _prefix_setting = "native_delay_prefix in the URL"

    _way_to_tables = (
        "start a worker or run `celery -A PROJ delay declare`, which make them, or correct "
        "native_delay_store, in workers and producers"
    )

    @contextmanager
    def explained(self) -> Iterator[None]:
        """Turn database errors in a ``with`` block into this package's exceptions."""
        try:
            yield
        # SQLite's BEGIN runs on the driver's connection, so its errors are not SQLAlchemy's.
        except (exc.SQLAlchemyError, self.engine.dialect.loaded_dbapi.Error) as error:
            said = str(getattr(error, "orig", None) or error).strip() or type(error).__name__
            raise self._unavailable(said.splitlines()[0]) from error

    def _make_tables(self) -> None:
        with self.engine.begin() as connection:
            seen = inspect(connection)
            made = list(filter(seen.has_table, self.tables.tables))
            other = None if made else other_prefix(self.table_prefix, seen.get_table_names())
            for name in made:
                theirs = {each["name"] for each in seen.get_columns(name)}
                if not theirs.issuperset(self.tables.tables[name].columns.keys()):
                    raise self._unavailable(
                        f"{name} is the table of another program: choose another "
                        f"native_delay_prefix in the URL, in workers and producers"
                    )
            self.tables.create_all(connection)
        if other is not None:
            told = "native delay: %s has new tables; tasks stay in its tables with the prefix %s"
            logger.warning(told, self.where, other)
        self.is_ready = True

    def _tried(
        self, connect: Callable[[], AbstractContextManager[Connection]], work: Callable[[Any], T]
    ) -> T:
        with self.explained():
            for tries_left in reversed(range(_TRIES)):
                began = monotonic()
                try:
                    if not self.is_ready:
                        self._make_tables()
                    with connect() as connection:
                        result = work(connection)
                        before_commit()
                        return result
                except (exc.IntegrityError, exc.OperationalError, exc.ProgrammingError) as error:
                    self.is_ready = False
                    is_slow = monotonic() - began > _QUICK_SECONDS
                    if not tries_left or is_slow or error.connection_invalidated:
                        raise
        raise AssertionError("unreachable")

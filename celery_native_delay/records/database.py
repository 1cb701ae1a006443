"""A database that keeps messages or records: its engine, its clock, its transactions."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from time import monotonic, time, time_ns
from typing import Any, ClassVar, TypeVar

from sqlalchemy import (
    URL,
    Connection,
    Engine,
    MetaData,
    create_engine,
    event,
    exc,
    make_url,
    text,
)

from ..errors import NativeDelayError, SettingsError
from ..urls import without_password

T = TypeVar("T")

#: Another may make the tables, or write the same row, at the same time.
_TRIES = 6

#: What took longer than this, in seconds, is not tried again.
_QUICK_SECONDS = 2.0

#: An option of our own in the URL of a SQLite store; in lower case the first is the default.
SYNCHRONOUS = ("normal", "full")

#: Milliseconds for which another process may write to the same SQLite file.
_BUSY_MS = 5_000

#: An execution option: SQLite need not lock what is only read.
READS = "native_delay_reads"


def parsed(url: str) -> URL:
    """*url* as SQLAlchemy has it; SettingsError if it is none."""
    try:
        return make_url(url)
    except (exc.ArgumentError, ValueError) as error:
        raise SettingsError(
            f"expected native_delay_store to be a URL of SQLAlchemy such as "
            f"sqlite:////var/lib/shop/delays.db, got {without_password(url)!r}"
        ) from error


def same_database(one: str, other: str) -> bool:
    """True if both URLs lead to the same database, by whatever driver and user."""
    return _place(parsed(one)) == _place(parsed(other))


_WHERE = ("host", "port", "options")


def _place(url: URL) -> tuple[Any, ...]:
    backend = url.get_backend_name()
    if backend == "sqlite":
        return backend, str(Path(url.database or "").absolute().resolve())
    # PostgreSQL's options may name another schema.
    query = {name: value for name, value in url.query.items() if name in _WHERE}
    return backend, url.host, url.port, url.database, query


def engine_of(url: str, *, setting: str = "native_delay_store") -> Engine:
    """An engine for *url*, which connects when it is first used.

    SettingsError: no such database, or its driver is not installed.
    """
    place = parsed(url)
    try:
        if place.get_backend_name() == "sqlite":
            return _sqlite(place)
        # A connection that the server has closed meanwhile is noticed before it is used.
        return create_engine(place, pool_pre_ping=True, **_of_servers(place))
    except (exc.ArgumentError, ImportError) as error:
        raise SettingsError(
            f"{setting} {without_password(url)!r} cannot be used: {error}"
        ) from error


def _of_servers(place: URL) -> dict[str, Any]:
    """Arguments of an engine for a server, where they are known."""
    if place.get_backend_name() not in ("postgresql", "mysql", "mariadb"):
        return {}
    # Seconds that a producer waits for a server that does not answer.
    patience = {} if "connect_timeout" in place.query else {"connect_timeout": 5}
    # Stricter ones, which may have been made a database's default, refuse a dispatcher at the
    # end of its transaction what it has put into queues already.
    return {"connect_args": patience, "isolation_level": "READ COMMITTED"}


def _sqlite(place: URL) -> Engine:
    mode = place.query.get("synchronous", SYNCHRONOUS[0])
    if str(mode).lower() not in SYNCHRONOUS:
        raise SettingsError(f"expected synchronous=normal or full in the store's URL, got {mode!r}")
    engine = create_engine(place.difference_update_query(["synchronous"]))
    file = Path(place.database or "").absolute()

    @event.listens_for(engine, "connect")
    def prepare(connection: Any, record: Any) -> None:
        connection.isolation_level = None  # transactions begin where we say so
        connection.execute(f"PRAGMA busy_timeout = {_BUSY_MS}")
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute(f"PRAGMA synchronous = {mode}")
        record.info["file"] = _identity(file)

    @event.listens_for(engine, "checkout")
    def notice_another_file(connection: Any, record: Any, proxy: Any) -> None:
        # SQLite would go on writing to a file that was removed or replaced.
        if record.info.get("file") != _identity(file):
            raise exc.DisconnectionError(f"{file} is not the file any more that was opened")

    @event.listens_for(engine, "begin")
    def begin(connection: Any) -> None:
        # A transaction that reads first and writes later fails where another one has written.
        reads = connection.get_execution_options().get(READS)
        # Not exec_driver_sql(): it takes as long as the insert that follows.
        connection.connection.dbapi_connection.execute("BEGIN" if reads else "BEGIN IMMEDIATE")

    return engine


#: How servers tell the time, in seconds since the epoch.
_TIMES = {
    "postgresql": text("SELECT extract(epoch FROM clock_timestamp())"),
    "mysql": text("SELECT unix_timestamp(now(6))"),
    "mariadb": text("SELECT unix_timestamp(now(6))"),
}


def now_us(connection: Connection) -> int:
    """The time in microseconds since the epoch, by the database's clock where it can be asked."""
    statement = _TIMES.get(connection.dialect.name)
    if statement is None:  # SQLite has ours
        return time_ns() // 1000
    return int(connection.execute(statement).scalar_one() * 1_000_000)


def clock_ahead_seconds(connection: Connection) -> float | None:
    """Seconds that the database's clock is ahead of ours, negative if behind; None: unknown."""
    if connection.dialect.name == "sqlite":
        return 0.0  # it has ours
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


class Database(ABC):
    """Transactions in one database, whose tables are made when they are missing; for any thread."""

    tables: ClassVar[MetaData]

    def __init__(self, url: str, *, setting: str) -> None:
        self.url = url
        self.where = without_password(url)
        self.engine = engine_of(url, setting=setting)
        #: True if the tables are there, as far as is known.
        self.is_ready = False

    @abstractmethod
    def _unavailable(self, reason: str) -> NativeDelayError:
        """The error to raise when the database cannot be used, for that *reason*."""

    def do(self, work: Callable[[Connection], T]) -> T:
        """*work* in a transaction; again if another has made the tables or the row meanwhile."""
        return self._tried(self.engine.begin, work)

    def look_up(self, work: Callable[[Connection], T]) -> T:
        """*work* in a transaction that only reads."""
        return self._tried(lambda: self.engine.connect().execution_options(**{READS: True}), work)

    def make_tables(self) -> None:
        """Make the tables that are missing."""
        with self.engine.begin() as connection:
            self.tables.create_all(connection)
        self.is_ready = True

    @contextmanager
    def explained(self) -> Iterator[None]:
        """A block whose errors of the driver are ours."""
        try:
            yield
        # A transaction of SQLite's is begun by the driver itself.
        except (exc.SQLAlchemyError, self.engine.dialect.loaded_dbapi.Error) as error:
            raise self._unavailable(reason_of(error)) from error

    def _tried(
        self, connect: Callable[[], AbstractContextManager[Connection]], work: Callable[[Any], T]
    ) -> T:
        with self.explained():
            for tries_left in reversed(range(_TRIES)):
                began = monotonic()
                try:
                    if not self.is_ready:
                        self.make_tables()
                    with connect() as connection:
                        return work(connection)
                except (exc.IntegrityError, exc.OperationalError, exc.ProgrammingError) as error:
                    self.is_ready = False
                    is_slow = monotonic() - began > _QUICK_SECONDS
                    if not tries_left or is_slow or error.connection_invalidated:
                        raise
        raise AssertionError("unreachable")


def reason_of(error: BaseException) -> str:
    """The driver's own words, in one line."""
    said = str(getattr(error, "orig", None) or error).strip()
    return said.splitlines()[0] if said else type(error).__name__

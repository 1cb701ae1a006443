"""The brokers that the conformance suite runs on.

A new transport adds its broker here, to ``BROKERS`` and ``running_broker()``; the promises stay.
"""

from __future__ import annotations

import shutil
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import count
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, quote, unquote, urlsplit

import pytest
from kombu.transport import filesystem
from sqlalchemy import MetaData, create_engine, delete

from celery_native_delay.testing import PrivateRabbitMQ, private_redis, require_redis, vhost_name
from example_project.private_sqs import PrivateSqs, private_sqs, require_sqs
from pytest_celery_native_delay import installed
from tests.brokers import MORTAL, ON_RABBITMQS, in_ci, installed_rabbitmq
from tests.mariadb import find_mariadb, private_mariadb
from tests.postgresql import PrivatePostgreSQL, find_postgresql, private_postgresql

BROKERS = [
    *(pytest.param(each.id, marks=each.marks) for each in ON_RABBITMQS),
    pytest.param("redis", marks=pytest.mark.redis),
    in_ci("valkey"),
    "filesystem",
    in_ci("sqla"),
    in_ci("sqs"),
    in_ci("pgmq"),
]


def without(*names: str) -> list[Any]:
    """All brokers but those on which a module's tests would show nothing new, or cannot run."""
    return [each for each in BROKERS if getattr(each, "values", (each,))[0] not in names]


#: The stores beside the spaces of a test that gives a store to a broker that can delay.
STORES: dict[str, str] = {}


class Broker(ABC):
    """A running broker that belongs to this suite, and its server or folder."""

    def __init__(self, server: Any) -> None:
        self.server = server
        self.numbers = count(1)

    @abstractmethod
    def new_space(self) -> str:
        """The URL of an empty part of the broker, for one test."""

    def remove_space(self, url: str) -> None:
        """Remove a space after its test; all connections are closed."""
        self.wipe(url)

    @abstractmethod
    def wipe(self, url: str) -> None:
        """Delete all messages and declarations of the space; connections stay open."""

    def restart(self) -> None:
        """Stop the broker cleanly and start it again, with the same URLs and data."""
        self.server.stop()
        self.server.start()


@contextmanager
def running_broker(name: str, running_rabbitmq: Callable[..., PrivateRabbitMQ]) -> Iterator[Broker]:
    """The broker of that name, until the block ends; skips or fails the test if not installed."""
    match name.split("-"):
        case ["rabbitmq", version]:
            yield RabbitMQ(running_rabbitmq(installed_rabbitmq(version), **MORTAL))
        case ["redis" | "valkey" as server]:
            installed(require_redis, server)
            with private_redis(server=server, config=Redis.CONFIG) as redis:
                yield Redis(redis)
        case ["filesystem"]:
            with folder() as spaces:
                yield Filesystem(spaces)
        case ["filesystem", "postgresql"]:
            installed(find_postgresql)
            with folder() as spaces, private_postgresql() as server:
                yield Filesystem(spaces, server)
        case ["sqla"]:
            with folder() as spaces:
                yield Database(spaces)
        case ["pgmq"]:
            pytest.importorskip("kombu.transport.pgmq", reason="kombu before 5.7")
            pytest.importorskip("pgmq.install")
            installed(find_postgresql)
            with private_postgresql() as server:
                yield Pgmq(server)
        case ["sqs"]:
            installed(require_sqs)
            with ExitStack() as stack:
                yield SQS(stack)
        case _:
            raise LookupError(name)


@contextmanager
def running_database(kind: str, folder: Path) -> Iterator[str]:
    """The URL of a new database, for SQLAlchemy: of SQLite in *folder*, or of a private server."""
    match kind:
        case "sqlite":
            yield f"sqlite:///{folder}/shop.db"
        case "mariadb":
            installed(find_mariadb)
            with private_mariadb() as mariadb:
                yield mariadb.new_database()
        case "postgresql":
            installed(find_postgresql)
            with private_postgresql() as postgresql:
                yield postgresql.new_database()


def knows_bindings(url: str) -> bool:
    """True if each connection sees all bindings, so that broadcasts and remote control work.

    In kombu's sqlalchemy and SQS transports a connection sees its own bindings only; in pgmq this
    holds for bindings to direct exchanges.
    """
    return not url.startswith(("sqla+", "sqs://", "pgmq://"))


def needs_store(url: str) -> bool:
    """True if tasks wait in the broker and cannot be listed there, unless a store is set."""
    return url.startswith(("amqp", "sqs://", "pgmq://"))


def own_store(url: str) -> str:
    """The URL of the database of a pgmq, which can also be a store."""
    name, folder = database_of(url)
    return f"postgresql+psycopg://postgres@/{name}?host={folder}"


def has_database_beside(broker: Broker) -> bool:
    """True for RabbitMQ 4.3; the store of the system's RabbitMQ and of SQS is a Redis."""
    return isinstance(broker, RabbitMQ) and bool(broker.server.installation.enter)


def whole_seconds(url: str) -> bool:
    """True if the broker rounds delays up to whole seconds."""
    return url.startswith(("sqs://", "pgmq://"))


@contextmanager
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="native-delay-spaces-") as path:
        yield Path(path)


def options_of(url: str) -> dict[str, Any]:
    """The transport options with which kombu reaches a space."""
    scheme, _, path = url.partition("://")
    if scheme == "sqs":
        # A consumer of several queues asks for one after the other.
        return {"wait_time_seconds": 0, "polling_interval": 0.1}
    if scheme == "pgmq":
        more = {"init_extension": False, "wait_time_seconds": 0, "polling_interval": 0.1}
        name, folder = database_of(url)
        # kombu's pgmq accepts no URL with a socket.
        return {"conn_string": f"user=postgres dbname={name} host={folder}", **more}
    if scheme != "filesystem":
        return {}
    queues = f"{path}/queues"
    return {
        "data_folder_in": queues,
        "data_folder_out": queues,
        "control_folder": f"{path}/control",
        "polling_interval": 0.1,
    }


def settings_of(url: str) -> dict[str, Any]:
    """The settings that delayed tasks need on this broker."""
    scheme, _, path = url.partition("://")
    if scheme == "filesystem":
        return {"store": Path(path, "store").read_text()}
    return {"store": STORES[url]} if url in STORES else {}


def database_of(url: str) -> tuple[str, str]:
    """The name of a pgmq's database, and the folder of its server's socket."""
    name, _, folder = url.rpartition("/")[2].partition("@")
    return name, unquote(folder)


class RabbitMQ(Broker):
    """A space is a virtual host."""

    def new_space(self) -> str:
        return self.server.new_vhost()

    def remove_space(self, url: str) -> None:
        self.server.delete_vhost(vhost_name(url))

    def wipe(self, url: str) -> None:
        """Deleting the virtual host itself would close its connections."""
        vhost = quote(vhost_name(url), safe="")
        for kind in ("exchanges", "queues"):
            for found in self.server.api("GET", f"/{kind}/{vhost}"):
                if found["name"] and not found["name"].startswith("amq."):
                    name = quote(found["name"], safe="")
                    self.server.api("DELETE", f"/{kind}/{vhost}/{name}")


class Redis(Broker):
    """A space is a database of a Redis or Valkey."""

    CONFIG = "databases 1000"

    def new_space(self) -> str:
        return f"redis://127.0.0.1:{self.server.port}/{next(self.numbers)}"

    def wipe(self, url: str) -> None:
        """Empty the database and drop the server's scripts, as on a new server."""
        client = self.server.client
        client.select(int(url.rpartition("/")[2]))
        client.flushdb()
        client.script_flush()


class Filesystem(Broker):
    """A space is a folder with the queues, and a store beside it."""

    def __init__(self, folder: Path, server: PrivatePostgreSQL | None = None) -> None:
        super().__init__(server)
        self._folder = folder

    def new_space(self) -> str:
        # kombu shares bindings between all folders of a process.
        filesystem.Transport.global_state.clear()
        space = self._folder / str(next(self.numbers))
        for name in ("queues", "control"):
            (space / name).mkdir(parents=True)
        store = self.server.new_database() if self.server else f"sqlite:///{space}/delays.db"
        (space / "store").write_text(store)
        return f"filesystem://{space}"

    def remove_space(self, url: str) -> None:
        shutil.rmtree(url.partition("://")[2])

    def wipe(self, url: str) -> None:
        """Delete the files, also while they are open, and drop the tables of a PostgreSQL."""
        space = Path(url.partition("://")[2])
        for name in ("queues", "control"):
            for file in (space / name).iterdir():
                file.unlink()
        for file in space.glob("delays.db*"):
            file.unlink()
        if self.server:
            drop_tables(settings_of(url)["store"])

    def restart(self) -> None:
        """Restart the PostgreSQL; a folder needs no restart."""
        if self.server:
            super().restart()


class Database(Broker):
    """A space is a SQLite file with kombu's tables and ours, in a folder."""

    def new_space(self) -> str:
        return f"sqla+sqlite:///{self.server}/{next(self.numbers)}.db"

    def remove_space(self, url: str) -> None:
        for file in self.server.glob(f"{Path(url).name}*"):
            file.unlink()

    def wipe(self, url: str) -> None:
        """Drop our tables and empty kombu's, which kombu does not create twice."""
        drop_tables(url.removeprefix("sqla+"))

    def restart(self) -> None:
        """A file needs no restart."""


def drop_tables(url: str) -> None:
    """Drop the package's tables and empty kombu's."""
    engine = create_engine(url)
    with engine.begin() as connection:
        tables = MetaData()
        tables.reflect(connection)
        for table in reversed(tables.sorted_tables):
            if table.name.startswith("kombu"):
                connection.execute(delete(table))
            else:
                table.drop(connection)
    engine.dispose()


class Pgmq(Broker):
    """A space is a database with the functions of pgmq, and with the records."""

    def new_space(self) -> str:
        from pgmq.install import get_embedded_install_sql

        database = urlsplit(self.server.new_database())
        (folder,) = parse_qs(database.query)["host"]
        url = f"pgmq://localhost/{database.path[1:]}@{quote(folder, safe='')}"
        self._execute(url, get_embedded_install_sql())
        self._declare(url)
        return url

    def remove_space(self, url: str) -> None:
        """Nothing to do: the server is removed at the end."""

    def wipe(self, url: str) -> None:
        self._execute(url, "SELECT pgmq.drop_queue(queue_name) FROM pgmq.list_queues()")
        drop_tables(own_store(url))
        self._declare(url)

    def _declare(self, url: str) -> None:
        """Create the queues of these tests: kombu publishes only to queues that exist."""
        for queue in ("jobs", "other"):
            self._execute(url, f"SELECT pgmq.create('{queue}')")

    @staticmethod
    def _execute(url: str, statement: str) -> None:
        import psycopg

        with psycopg.connect(options_of(url)["conn_string"], autocommit=True) as connection:
            connection.execute(statement)


class SQS(Broker):
    """A space is a moto server of its own, which stands for AWS; the next test takes it over."""

    def __init__(self, stack: ExitStack) -> None:
        super().__init__(stack)
        self._spaces: dict[str, PrivateSqs] = {}
        self._free: list[PrivateSqs] = []

    def new_space(self) -> str:
        sqs = self._free.pop() if self._free else self.server.enter_context(private_sqs())
        self._spaces[sqs.url] = sqs
        return sqs.url

    def remove_space(self, url: str) -> None:
        self.wipe(url)
        self._free.append(self._spaces.pop(url))

    def wipe(self, url: str) -> None:
        self._spaces[url].wipe()

    def restart(self) -> None:
        pytest.skip("moto keeps its messages in memory: what survives in AWS cannot be shown on it")

"""Stores and kombu's polling transports without a server: the dispatcher, pauses, URLs, tables.

``python -m tests.unit.test_store`` writes the golden files: for a new version, or before the first
release.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from threading import Thread
from time import monotonic
from typing import Any
from unittest.mock import Mock
from uuid import uuid4

import pytest
from kombu import Connection
from kombu.exceptions import OperationalError
from sqlalchemy import Dialect, Table
from sqlalchemy.dialects import mysql, postgresql, sqlite
from sqlalchemy.schema import CreateIndex, CreateTable

from celery_native_delay import SettingsError
from celery_native_delay.errors import StoreUnavailable
from celery_native_delay.settings import DelaySettings
from celery_native_delay.store import dispatcher as dispatcher_module
from celery_native_delay.store.database import engine_of
from celery_native_delay.store.dispatcher import Dispatcher
from celery_native_delay.store.entry import StoreEntry
from celery_native_delay.store.interface import Row, Store
from celery_native_delay.store.opened import store_at, store_of
from celery_native_delay.store.sql_table import RECORDS, TASKS, schema
from celery_native_delay.transports.sql import transport_of
from celery_native_delay.urls import without_password
from tests.traffic import beside
from tests.waiting import PATIENCE_SECONDS, wait_until

# ---- the dispatcher, with a store in SQLite and a made-up broker ---------------------------------


def made_up_broker() -> Any:
    return Mock(publish=Mock(side_effect=lambda entries: dict.fromkeys(range(len(entries)))))


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    with closing(store_at(f"sqlite:///{tmp_path}/delays.db", "d", timeout_seconds=5)) as store:
        store.prepare()
        monkeypatch.setattr(store, "look_seconds", 0.01)
        yield store


@pytest.fixture
def asked(store: Store, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the dispatcher asks the store, which is away when it first settles something."""
    names: list[str] = []

    def noted(name: str, ask: Callable[..., Any], *args: Any, **options: Any) -> Any:
        names.append(name)
        if name == "settle" and names.count(name) <= 2:
            raise StoreUnavailable("it is away")
        return ask(*args, **options)

    for name in ("take", "settle", "release"):
        monkeypatch.setattr(store, name, partial(noted, name, getattr(store, name)))
    return names


@pytest.mark.parametrize("leads", [True, False])
def test_a_dispatcher_connects_before_a_task_is_due_if_it_leads(
    store: Store, asked: list[str], leads: bool
) -> None:
    """The first due task does not wait for a connection; the others open none in vain."""
    connect = Mock(side_effect=made_up_broker)
    assert leads or store.leads("another")
    dispatcher = Dispatcher(store, connect)
    with beside(dispatcher.run, stop=dispatcher.stop):
        wait_until(lambda: "take" in asked)
        assert connect.call_count == leads


def test_what_is_published_is_noted_as_soon_as_the_store_is_back(
    store: Store, asked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the lease of the row can end: then it would be published again."""
    monkeypatch.setattr(dispatcher_module, "_RELEASE_SECONDS", 0)
    store.add([Row.of(StoreEntry(0, "", "jobs", {}, b"", "a"))])
    broker = made_up_broker()
    dispatcher = Dispatcher(store, lambda: broker)
    with beside(dispatcher.run, stop=dispatcher.stop):
        wait_until(lambda: asked.count("take") >= 2)
    first = asked.index("take")
    assert asked[first : first + 5] == ["take", "settle", "settle", "settle", "release"]
    assert list(store.tasks(None).ids()) == []
    assert (len(broker.publish.mock_calls), dispatcher.promoted) == (1, 1)


def test_an_outage_of_the_broker_is_one_line_in_the_log(
    store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    """A broker that cannot be reached is no bug, so no traceback hides the line."""
    refused = OperationalError("connection refused")
    dispatcher = Dispatcher(store, Mock(side_effect=refused))
    with beside(dispatcher.run, stop=dispatcher.stop):
        wait_until(lambda: "OperationalError: connection refused" in caplog.text)
    assert "Traceback" not in caplog.text


# ---- kombu's polling transports with a store -----------------------------------------------------


@pytest.fixture
def polled() -> Iterator[Connection]:
    """A connection that polls its empty broker once an hour."""
    options = {"native_delay": True, "polling_interval": 3600}
    with Connection(
        "memory://", transport=transport_of("memory"), transport_options=options
    ) as connection:
        connection.default_channel.queue_declare("empty")
        connection.default_channel.basic_consume("empty", True, lambda message: None, "tag")
        yield connection


def test_a_waker_ends_the_pause_between_two_polls(polled: Connection) -> None:
    """A worker's threads leave work to its loop, which would only see it after the pause."""
    wake = polled.transport.waker()
    Thread(target=wake).start()
    begun = monotonic()
    with pytest.raises(TimeoutError):
        polled.drain_events(timeout=3600)
    assert monotonic() - begun < PATIENCE_SECONDS


def test_without_a_waker_drain_events_waits_for_its_timeout(polled: Connection) -> None:
    """Only workers ask for a waker."""
    begun = monotonic()
    with pytest.raises(TimeoutError):
        polled.drain_events(timeout=0.2)
    assert monotonic() - begun >= 0.2


@pytest.fixture
def queue(tmp_path: Path) -> Iterator[Any]:
    """A queue in a folder, of kombu's broker "filesystem"."""
    options = {
        "native_delay": True,
        "data_folder_in": str(tmp_path),
        "data_folder_out": str(tmp_path),
        "control_folder": str(tmp_path / "control"),
    }
    ours = transport_of("filesystem")
    with Connection("filesystem://", transport=ours, transport_options=options) as connection:
        yield connection.SimpleQueue(f"orders-{uuid4()}")  # kombu remembers bindings


def test_a_file_that_a_producer_still_writes_is_not_consumed(
    queue: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """kombu's own consumer takes such a file, fails and loses it."""
    seen: list[str] = []

    def write(path: Path, data: bytes) -> int:
        seen.append(path.name)
        with path.open("wb") as file:
            return file.write(data)

    monkeypatch.setattr(Path, "write_bytes", write)
    queue.put("whole")
    assert [queue.queue.name in each for each in seen] == [False]
    message = queue.get(block=False)
    assert message.payload == "whole"
    message.ack()


def test_a_file_that_a_plain_producer_still_writes_waits(queue: Any, tmp_path: Path) -> None:
    """kombu's own consumer would end with JSONDecodeError, and lose the message."""
    queue.put("whole")
    (path,) = tmp_path.glob("*.msg")
    whole = path.read_bytes()
    for part in (b"", whole[:20]):
        path.write_bytes(part)
        with pytest.raises(queue.Empty):
            queue.get(block=False)
    path.write_bytes(whole)
    message = queue.get(block=False)
    assert message.payload == "whole"
    message.ack()


# ---- URLs --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("sqlite:////var/delays.db?synchronous=full", "sqlite:////var/delays.db?synchronous=full"),
        (
            "postgresql+psycopg://shop:a:b@db/x?host=/run",
            "postgresql+psycopg://shop:**@db/x?host=/run",
        ),
        (
            "postgresql:///x?user=shop&password=secret&port=1",
            "postgresql:///x?user=shop&password=**&port=1",
        ),
        ("mysql://shop:s/e@c?ret@db/x", "mysql://shop:**@db/x"),
        ("redis://:secret@store:6379/1", "redis://:**@store:6379/1"),
        ("redis://store:6379/1", "redis://store:6379/1"),
    ],
)
def test_a_url_is_shown_without_its_password(url: str, shown: str) -> None:
    assert without_password(url) == shown


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("nosuch://db/shop", "nosuch"),
        ("sqlite:///a.db?synchronous=off", "expected synchronous=normal or full"),
        ("postgresql+nodriver://shop:secret@db/shop", "cannot be used"),
    ],
)
def test_an_unusable_database_is_named_without_its_password(url: str, said: str) -> None:
    with pytest.raises(SettingsError, match=said) as refused:
        engine_of(url)
    assert "secret" not in str(refused.value)


# ---- existing databases ------------------------------------------------------------------------


GOLDEN = Path(__file__).parent / "golden"

DIALECTS = [sqlite.dialect(), postgresql.dialect(), mysql.dialect()]

#: The tables of records are made when one is first used; each text in them has a version.
FROZEN = {"store": TASKS, "records": RECORDS}


@pytest.mark.parametrize("dialect", DIALECTS, ids=lambda dialect: dialect.name)
@pytest.mark.parametrize(("name", "table"), FROZEN.items(), ids=FROZEN)
def test_tables_are_frozen(name: str, table: Table, dialect: Dialect) -> None:
    """Databases in production have these tables. To change one, add a version or a table."""
    assert declared(table, dialect) == golden(name, dialect).read_text()


@pytest.mark.parametrize("dialect", DIALECTS, ids=lambda dialect: dialect.name)
def test_with_a_prefix_only_the_names_of_tables_differ(dialect: Dialect) -> None:
    texts = "".join(golden(name, dialect).read_text() for name in ("records", "store"))
    tables = schema("shop_delay_").sorted_tables
    found = "".join(declared(table, dialect) for table in tables)
    assert found == texts.replace("native_delay_", "shop_delay_")


def golden(name: str, dialect: Dialect) -> Path:
    return GOLDEN / f"{name}_{dialect.name}.sql"


def declared(table: Table, dialect: Dialect) -> str:
    statements = [
        str(create(element).compile(dialect=dialect)).strip()
        for create, elements in (
            (CreateTable, [table]),
            (CreateIndex, sorted(table.indexes, key=lambda index: str(index.name))),
        )
        for element in elements
    ]
    return ";\n".join([*statements, ""])


@pytest.mark.parametrize(
    ("url", "told"),
    [
        ("sqlite:///no-such-folder/a.db", True),
        ("sqlite:////no-such-folder/a.db", False),
        ("sqlite:///file:/no-such-folder/a.db?uri=true", False),
    ],
)
def test_a_relative_path_of_a_database_file_is_warned_about_once(
    url: str, told: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Producers are warned as well: in a web server's folder it may be another file."""
    for _ in range(2):
        store_of(DelaySettings(store=url))
    assert caplog.text.count("is another file for each folder") == told


if __name__ == "__main__":
    for name, table in FROZEN.items():
        for dialect in DIALECTS:
            golden(name, dialect).write_text(declared(table, dialect))

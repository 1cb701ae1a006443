"""The parts of a database store that need no database.

``python -m tests.unit.test_store`` writes the golden files: for a new version, or before the first
release.
"""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from celery import Celery
from celery.exceptions import WorkerShutdown
from sqlalchemy import Dialect, MetaData
from sqlalchemy.dialects import mysql, postgresql, sqlite
from sqlalchemy.schema import CreateIndex, CreateTable

from celery_native_delay import SettingsError, store_outage
from celery_native_delay.records.database import engine_of, same_database
from celery_native_delay.records.sql import METADATA as RECORDS_METADATA
from celery_native_delay.transports.interface import Outage
from celery_native_delay.transports.sql.breakers import Breaker, Breakers
from celery_native_delay.transports.sql.schema import METADATA, VERSION
from celery_native_delay.transports.sql.store import Store
from celery_native_delay.urls import without_password
from celery_native_delay.worker.outage import react

AWAY = OSError("it is away")


# ---- breakers ----------------------------------------------------------------------------------


def test_a_breaker_reports_one_outage_and_closes_by_a_success() -> None:
    breaker = Breaker("nothing", 120)
    assert [breaker.failed(AWAY, now=now) for now in (1000, 1060, 1119.9)] == [None, None, None]
    outage = breaker.failed(AWAY, now=1120)
    assert outage == Outage("nothing", 120, "OSError: it is away")
    assert str(outage) == "nothing has failed for 2 min: OSError: it is away"
    assert breaker.failed(AWAY, now=2000) is None
    assert breaker.succeeded(now=2001) == 1001
    assert breaker.succeeded(now=2002) is None
    assert breaker.failed(AWAY, now=3000) is None
    assert breaker.failed(AWAY, now=3120) is not None


def test_a_success_restarts_the_time_until_an_outage() -> None:
    breaker = Breaker("nothing", 120)
    breaker.failed(AWAY, now=0)
    breaker.succeeded(now=100)
    assert breaker.failed(AWAY, now=121) is None


def test_breakers_are_independent_and_call_their_listener() -> None:
    breakers = Breakers(10)
    told: list[Outage] = []
    breakers.on_outage = told.append
    for now in (0, 5, 10):
        breakers.failed(breakers.store, AWAY, now=now)
        breakers.failed(breakers.dispatch, AWAY, now=now + 1)
        breakers.fetch.succeeded(now=now)
    assert [outage.what for outage in told] == ["storing", "dispatching what is due"]


# ---- the hook ----------------------------------------------------------------------------------


OUTAGE = Outage("fetching what is due", 120, "OSError: it is away")


def test_a_worker_stops_in_an_outage_unless_a_receiver_handles_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    app, stops, seen = Celery("shop", set_as_current=False), [], []
    with caplog.at_level(logging.CRITICAL, "celery_native_delay"):
        react(app, OUTAGE, lambda: stops.append(1))
    assert stops == [1]
    assert str(OUTAGE) in caplog.text

    def decide(sender: Celery, outage: Outage, **_: object) -> None:
        seen.append((sender, outage))

    store_outage.connect(decide)
    try:
        react(app, OUTAGE, lambda: stops.append(2))
    finally:
        store_outage.disconnect(decide)
    assert (stops, seen) == ([1], [(app, OUTAGE)])


@pytest.mark.parametrize("error", [ValueError("a mistake"), WorkerShutdown(3)])
def test_a_worker_stops_in_an_outage_if_its_receiver_raises(error: BaseException) -> None:
    app, stops = Celery("shop", set_as_current=False), []

    def fail(**_: object) -> None:
        raise error

    store_outage.connect(fail)
    try:
        react(app, OUTAGE, lambda: stops.append(1))
    finally:
        store_outage.disconnect(fail)
    assert stops == [1]


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
    ("one", "other", "same"),
    [
        ("sqlite:////var/a.db", "sqlite+pysqlite:////var/x/../a.db?synchronous=full", True),
        ("sqlite:///a.db", "sqlite:///b.db", False),
        ("postgresql://a:b@db/shop", "postgresql+psycopg://c:d@db/shop", True),
        ("postgresql:///shop?host=/run/1", "postgresql:///shop?host=/run/2", False),
        ("postgresql://db/shop", "mysql://db/shop", False),
        ("postgresql://db/shop", "postgresql://db/shop?options=-csearch_path%3Dshop", False),
        ("postgresql://db:5432/shop", "postgresql://db:5433/shop", False),
    ],
)
def test_urls_of_the_same_database_are_recognized(one: str, other: str, same: bool) -> None:
    assert same_database(one, other) is same


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
FROZEN = {f"store_v{VERSION}": METADATA, "records": RECORDS_METADATA}


@pytest.mark.parametrize("dialect", DIALECTS, ids=lambda dialect: dialect.name)
@pytest.mark.parametrize(("name", "tables"), FROZEN.items(), ids=FROZEN)
def test_tables_are_frozen(name: str, tables: MetaData, dialect: Dialect) -> None:
    """Databases in production have these tables. To change one, add a version or a table."""
    assert declared(tables, dialect) == golden(name, dialect).read_text()


def golden(name: str, dialect: Dialect) -> Path:
    return GOLDEN / f"{name}_{dialect.name}.sql"


def declared(tables: MetaData, dialect: Dialect) -> str:
    statements = [
        str(create(element).compile(dialect=dialect)).strip()
        for table in tables.sorted_tables
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
        Store.of(url, "tests")
    assert caplog.text.count("is another file for each folder") == told


if __name__ == "__main__":
    for name, tables in FROZEN.items():
        for dialect in DIALECTS:
            golden(name, dialect).write_text(declared(tables, dialect))

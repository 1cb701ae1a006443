"""The parts of a database store that need no database.

``python -m tests.unit.test_store`` writes the golden files: for a new version, or before the first
release.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from sqlalchemy import Dialect, Table
from sqlalchemy.dialects import mysql, postgresql, sqlite
from sqlalchemy.schema import CreateIndex, CreateTable

from celery_native_delay import SettingsError
from celery_native_delay.settings import DelaySettings
from celery_native_delay.store.database import engine_of
from celery_native_delay.store.opened import store_of
from celery_native_delay.store.sql_table import RECORDS, TASKS, schema
from celery_native_delay.urls import without_password

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
def test_with_a_prefix_the_tables_have_other_names_and_nothing_else_differs(
    dialect: Dialect,
) -> None:
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

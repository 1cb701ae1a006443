"""Create the tables of waiting tasks and of their state, as the store itself declares them."""

from __future__ import annotations

from typing import Any, ClassVar

from django.db import migrations


def tables_of(connection: Any) -> tuple[Any, list[Any]]:
    """Return SQLAlchemy's dialect for a connection of Django's, and the tables."""
    from celery_native_delay.store.django import dialect_of, table_prefix
    from celery_native_delay.store.sql_table import schema

    return dialect_of(connection), schema(table_prefix()).sorted_tables


def create(apps: Any, schema_editor: Any) -> None:
    from sqlalchemy.schema import CreateIndex, CreateTable

    dialect, tables = tables_of(schema_editor.connection)
    for table in tables:
        # Without parameters: a "%" of a statement is no placeholder.
        schema_editor.execute(str(CreateTable(table).compile(dialect=dialect)), params=None)
        for index in sorted(table.indexes, key=lambda index: str(index.name)):
            schema_editor.execute(str(CreateIndex(index).compile(dialect=dialect)), params=None)


def drop(apps: Any, schema_editor: Any) -> None:
    from sqlalchemy.schema import DropTable

    dialect, tables = tables_of(schema_editor.connection)
    for table in tables:
        schema_editor.execute(str(DropTable(table).compile(dialect=dialect)), params=None)


class Migration(migrations.Migration):
    initial = True
    dependencies: ClassVar[list[Any]] = []
    # MySQL creates no tables within a transaction. On others, the whole migration is one.
    operations: ClassVar[list[Any]] = [migrations.RunPython(create, drop, atomic=False)]

"""Register ``format("celery")`` with Spark 4, which imports all modules named ``pyspark_*``.

Spark imports these modules when a session first uses a data source in Python. So this module
imports little and must not fail.
https://spark.apache.org/docs/latest/api/python/tutorial/sql/python_data_source.html
"""

from __future__ import annotations

from typing import Any

try:
    from pyspark.sql.datasource import DataSource
except ImportError:  # Spark 3.5 has no data sources in Python
    pass
else:

    class DefaultSource(DataSource):
        """The Spark sink that sends rows as delayed Celery tasks."""

        @classmethod
        def name(cls) -> str:
            """Return the name that users pass to ``format()``."""
            return "celery"

        def writer(self, schema: Any, overwrite: bool) -> Any:
            """Return the writer for ``df.write``."""
            from celery_native_delay.spark.sink import Writer

            return Writer(schema, self.options, overwrite=overwrite)

        def streamWriter(self, schema: Any, overwrite: bool) -> Any:  # noqa: N802  Spark's name
            """Return the writer for ``df.writeStream``."""
            from celery_native_delay.spark.sink import StreamWriter

            return StreamWriter(schema, self.options, overwrite=overwrite)

"""Makes ``format("celery")`` known to Spark 4, which looks for modules named ``pyspark_*``.

Spark imports this module when a session first uses any data source written in Python, so nothing
else is imported here, and nothing may fail.
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
        """Delayed Celery tasks, to be written to."""

        @classmethod
        def name(cls) -> str:
            """What ``format()`` takes."""
            return "celery"

        def writer(self, schema: Any, overwrite: bool) -> Any:
            """For ``df.write``."""
            from celery_native_delay.spark.sink import Writer

            return Writer(schema, self.options, overwrite=overwrite)

        def streamWriter(self, schema: Any, overwrite: bool) -> Any:  # noqa: N802  Spark's name
            """For ``df.writeStream``."""
            from celery_native_delay.spark.sink import StreamWriter

            return StreamWriter(schema, self.options, overwrite=overwrite)

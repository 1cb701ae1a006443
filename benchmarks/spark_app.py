"""The apps that Spark's executors import; the broker is in the environment of the session."""

from __future__ import annotations

import os

from benchmarks.apps import make_app

URL = os.environ["BENCH_SPARK_URL"]

app = make_app("ours", URL)

plain = make_app("held", os.environ["BENCH_SPARK_PLAIN_URL"], confirm=True)

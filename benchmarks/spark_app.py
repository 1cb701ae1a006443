"""The Celery apps that Spark's executors import; the broker's URL is in an environment variable."""

from __future__ import annotations

import os

from benchmarks.apps import make_app

app = make_app("ours", os.environ["BENCH_SPARK_URL"])

plain = make_app("held", os.environ["BENCH_SPARK_PLAIN_URL"], confirm=True)

store_app = make_app("ours", os.environ["BENCH_SPARK_URL"], store=os.environ["BENCH_SPARK_STORE"])

redis_app = make_app("ours", os.environ["BENCH_SPARK_REDIS_URL"])

redis_plain = make_app("held", os.environ["BENCH_SPARK_REDIS_PLAIN_URL"])

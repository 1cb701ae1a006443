"""The app of the worker that ``apps.running_worker`` starts with ``celery -A
benchmarks.worker_app``.
"""

import json
import os
from pathlib import Path
from typing import Any

from celery.signals import worker_ready

from benchmarks.apps import make_app

app = make_app(os.environ["BENCH_METHOD"], os.environ["BENCH_URL"])
app.conf.update(json.loads(os.environ["BENCH_CONF"]))
if "bench_entries" in app.conf:
    from benchmarks.schedules import entries

    app.conf.beat_schedule = entries(*app.conf.bench_entries)


@worker_ready.connect(weak=False)
def say_ready(**_: Any) -> None:
    Path(os.environ["BENCH_READY"]).touch()

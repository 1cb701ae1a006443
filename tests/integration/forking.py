"""An app that publishes while it is imported, as gunicorn with ``--preload`` imports it."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from celery import Celery

from celery_native_delay import install

#: Delayed tasks of each call of :func:`publish`.
EACH = 10

QUEUE = "forked"

app = install(
    Celery(
        "forking",
        broker=os.environ["FORKING_BROKER"],
        set_as_current=False,
        changes={"task_default_queue": QUEUE},
    ),
    levels=8,
    fused_bits=0,
)


def publish() -> None:
    for _ in range(EACH):
        app.send_task("t", countdown=1)


def application(environ: dict[str, Any], start: Callable[..., Any]) -> list[bytes]:
    publish()
    start("200 OK", [("Content-Length", "0")])
    return [b""]


publish()

"""Write each start of a task as one JSON line into the file that EXAMPLE_RECORD names.

The demo reads the starts from this file. If the environment variable is not set, nothing is
written.
"""

import json
import os
import time
from datetime import UTC, datetime
from typing import Any

from celery import Task
from celery.signals import task_prerun


def due_seconds(eta: str | None) -> float | None:
    """Return the Unix time of an ETA in a Celery message; a naive ETA is in the app's time zone,
    UTC.
    """
    if eta is None:
        return None
    due = datetime.fromisoformat(eta)
    return (due if due.tzinfo else due.replace(tzinfo=UTC)).timestamp()


@task_prerun.connect
def record_start(task_id: str, task: Task, **_: Any) -> None:
    """Append one line about the attempt that starts."""
    started = time.time()
    if not (path := os.environ.get("EXAMPLE_RECORD")):
        return
    line = {
        "id": task_id,
        "task": task.name,
        "retries": task.request.retries,
        "due": due_seconds(task.request.eta),
        "started": started,
        "pid": os.getpid(),
        "delivery_info": task.request.delivery_info,
    }
    # The line is a single write to a file opened for appending, so lines of several processes never
    # mix.
    record = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(record, json.dumps(line).encode() + b"\n")
    finally:
        os.close(record)

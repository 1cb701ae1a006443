"""The tasks and the app of the acceptance tests.

It does not import celery_native_delay, because plain producers and workers use it as well.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections import Counter
from pathlib import Path
from typing import Any

from celery import Celery, Task
from celery.signals import task_postrun, task_prerun
from kombu import Exchange, Queue

CONF_VARIABLE = "ACCEPTANCE_CONF"
"""Environment variable: the app's configuration as JSON."""

RECORD_VARIABLE = "ACCEPTANCE_RECORD"
"""Environment variable: the file that gets one line for each execution of a task."""


class Busy(Exception):
    """The error of a task that is to be retried."""


def new_app(*, queue_type: str = "classic", no_declare: bool = False, **conf: Any) -> Celery:
    """An app with all tasks and queues; *conf* overrides the common settings of the tests.

    With *no_declare* the app declares no queues: they exist already.
    """
    app = Celery("acceptance", set_as_current=False)
    app.conf.update(
        {
            "task_queues": queues(queue_type, no_declare=no_declare),
            "task_default_queue": "default",
            "task_serializer": "json",
            "accept_content": ["json"],
            "timezone": "Europe/Berlin",  # not UTC: naive etas must not be taken for local time
            "broker_connection_retry_on_startup": True,
            "broker_connection_max_retries": None,
            "worker_cancel_long_running_tasks_on_connection_loss": False,
            "result_chord_retry_interval": 0.5,
        }
        | conf
    )
    define_tasks(app)
    return app


def app_of_environment() -> Celery:
    """The app with the configuration in this process's environment."""
    app = new_app(**json.loads(os.environ[CONF_VARIABLE]))
    app.set_default()
    return app


def queues(queue_type: str, *, no_declare: bool = False) -> list[Queue]:
    """One queue for each type of exchange, and two on the topic exchange."""
    options = {"queue_arguments": {"x-queue-type": queue_type}, "no_declare": no_declare}
    shop = Exchange("shop", type="topic", no_declare=no_declare)
    billing = Exchange("billing", type="direct", no_declare=no_declare)
    broadcast = Exchange("broadcast", type="fanout", no_declare=no_declare)
    return [
        Queue("default", **options),
        Queue("side", **options),
        Queue("orders", shop, routing_key="orders.#", **options),
        Queue("parcels", shop, routing_key="*.parcel", **options),
        Queue("invoices", billing, routing_key="invoice.new", **options),
        Queue("news", broadcast, **options),
    ]


def define_tasks(app: Celery) -> None:
    """Add the tasks to *app*; record_start() notes each start."""

    @app.task(name="note", shared=False)
    def note(*args: Any) -> Any:
        """Return the first argument."""
        return args[0] if args else None

    @app.task(name="careful", shared=False, acks_late=True)
    def careful(*args: Any) -> Any:
        """Return the first argument; the message is acknowledged after the run."""
        return args[0] if args else None

    @app.task(name="careful_once", shared=False, acks_late=True)
    def careful_once(*args: Any) -> Any:
        """As careful(); only some apps have a store, so their settings say that it is once."""

    @app.task(name="gather", shared=False)
    def gather(results: list[Any], *args: Any) -> Any:
        """The body of a chord."""
        return results

    @app.task(name="again", shared=False, bind=True, max_retries=None)
    def again(self: Task, times: int, countdown: float) -> None:
        """Call retry() *times* times."""
        if self.request.retries < times:
            raise self.retry(countdown=countdown, exc=Busy())

    @app.task(
        name="busy",
        shared=False,
        bind=True,
        autoretry_for=(Busy,),
        max_retries=None,
        retry_backoff=1,
        retry_backoff_max=1,  # jitter makes it 0 or 1 second
        retry_jitter=True,
    )
    def busy(self: Task, times: int) -> None:
        """Raise Busy *times* times; Celery retries the task automatically."""
        if self.request.retries < times:
            raise Busy

    @app.task(name="resend", shared=False, bind=True)
    def resend(self: Task, times: int, countdown: float, options: dict[str, Any]) -> None:
        """Send itself again *times* times, with the headers it was received with."""
        if times:
            self.apply_async(
                (times - 1, countdown, options),
                countdown=countdown,
                headers=self.request.headers,
                **options,
            )

    @app.task(name="call_api", shared=False)
    def call_api(tenant: str, number: int = 0) -> None:
        """A task whose rate per tenant is limited."""

    refused: Counter[str] = Counter()

    @app.task(name="turned_away", shared=False, bind=True)
    def turned_away(self: Task, seconds: float, times: int = 1) -> None:
        """Raise RetryAfter *times* times, in a worker of one process."""
        from celery_native_delay import RetryAfter

        refused[self.request.id] += 1
        if refused[self.request.id] <= times:
            raise RetryAfter(seconds)

    @app.task(name="hold", shared=False)
    def hold(seconds: float) -> None:
        """Occupy a process of the worker for *seconds*."""
        time.sleep(seconds)

    @app.task(name="alone", shared=False, bind=True, acks_late=True)
    def alone(self: Task, key: str, seconds: float) -> None:
        """Note start and end; no two runs of one *key* should overlap."""
        note_phase(key, self.request.id, "begins")
        time.sleep(seconds)
        note_phase(key, self.request.id, "ends")

    @app.task(name="mortal", shared=False, bind=True, acks_late=True, reject_on_worker_lost=True)
    def mortal(self: Task) -> None:
        """Kill the process that runs it, once; Celery then delivers the task again."""
        died = Path(f"{os.environ[RECORD_VARIABLE]}.{self.request.id}.died")
        if not died.exists():
            died.touch()
            os.kill(os.getpid(), signal.SIGKILL)

    @app.task(name="killed_after", shared=False, bind=True, acks_late=True)
    def killed_after(self: Task) -> None:
        """Kill the worker after this task has succeeded, and before its message is acknowledged."""

        def kill(**_: Any) -> None:
            os.killpg(os.getpgrp(), signal.SIGKILL)

        note_phase("killed_after", self.request.id, "ends")
        task_postrun.connect(kill, weak=False)


def note_phase(key: str, task_id: str, phase: str) -> None:
    """Append one line about a task that begins or ends."""
    line = {"key": key, "id": task_id, "phase": phase, "at": time.time(), "pid": os.getpid()}
    append(os.environ[RECORD_VARIABLE] + ".phases", line)


@task_prerun.connect
def record_start(task_id: str, task: Task, args: Any, **_: Any) -> None:
    """Append one line about the execution that starts now."""
    started = time.time()
    if not (path := os.environ.get(RECORD_VARIABLE)):
        return
    request = task.request
    line = {
        "id": task_id,
        "name": task.name,
        "args": args,
        "started": started,
        "eta": request.eta,
        "expires": request.expires,
        "delivery_info": request.delivery_info,
        "headers": request.headers,
        "retries": request.retries,
        "worker": request.hostname,
    }
    append(path, line)


def append(path: str, line: dict[str, Any]) -> None:
    # A single write to a file opened for appending, so lines of several processes never mix.
    record = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(record, json.dumps(line, default=repr).encode() + b"\n")
    finally:
        os.close(record)

"""Three Celery apps that differ only in how they delay a task, and a worker for each app.

=========  ==================================================================================
``ours``   celery_native_delay with its defaults
``held``   (a) plain Celery, classic queue: the worker holds the task until its ETA
``celery`` (b) Celery's own delayed delivery: quorum task queue behind a topic exchange
=========  ==================================================================================

``ours`` and ``celery`` use the same quorum queue and topic exchange.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from struct import Struct
from time import monotonic, sleep, time
from typing import Any

import kombu
from celery import Celery
from kombu import Exchange, Queue
from kombu.transport import native_delayed_delivery as celerys_own

from benchmarks.measuring import Bench
from celery_native_delay import install
from example_project.folder_broker import SCHEME, settings_of

LABELS = {"ours": "ours", "held": "(a) worker-held ETA", "celery": "(b) Celery's own"}

QUEUE = "bench"
TASK = "bench.record_start"
OTHER_TASK = "bench.record_start_too"

RECORD = Struct("<Id")
"""The struct of one recorded start of a task: the task's index and the Unix time."""

REPOSITORY = Path(__file__).resolve().parent.parent
BOOT_SECONDS = 60
STOP_SECONDS = 20


def make_app(method: str, url: str, *, confirm: bool = False, **settings: Any) -> Celery:
    """Create a Celery app that delays tasks by *method*: "ours", "held" or "celery".

    *confirm* is kombu's option ``confirm_publish``. *settings* are settings of this package.
    """
    app = Celery("bench", broker=url, set_as_current=False)
    held = method == "held"
    queue = Queue(
        QUEUE,
        Exchange(QUEUE, type="direct" if held else "topic"),
        routing_key=QUEUE,
        queue_arguments={} if held else {"x-queue-type": "quorum"},
    )
    app.conf.update(
        task_queues=[queue],
        task_default_queue=QUEUE,
        task_default_exchange=QUEUE,
        task_default_exchange_type=queue.exchange.type,
        task_default_routing_key=QUEUE,
        task_ignore_result=True,
        broker_transport_options={"confirm_publish": confirm},
    )
    app.conf.update(settings_of(url))
    if method == "ours":
        install(app, **settings)
    app.task(record_start, name=TASK)
    app.task(record_start, name=OTHER_TASK)
    return app


def record_start(index: int) -> None:
    """The body of the task: record its start in one write, so that records never mix."""
    now = time()
    os.write(_record_file(), RECORD.pack(index, now))


_files: dict[int, int] = {}


def _record_file() -> int:
    pid = os.getpid()  # each child of the pool opens it for itself
    if pid not in _files:
        _files[pid] = os.open(os.environ["BENCH_RECORD"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    return _files[pid]


def declare_for(method: str, app: Celery) -> None:
    """Declare the queues that a worker of *app* declares at boot, for runs without a worker."""
    with app.connection_for_write() as connection:
        channel = connection.default_channel
        for queue in app.amqp.queues.values():
            queue(channel).declare()
        if method == "ours":
            channel.delays.prepare()
        if method == "celery":
            celerys_own.declare_native_delayed_delivery_exchanges_and_queues(connection, "quorum")
            for queue in app.amqp.queues.values():
                celerys_own.bind_queue_to_native_delayed_delivery_exchange(connection, queue)


@contextmanager
def sending(method: str, url: str, *, confirm: bool = False, **settings: Any) -> Iterator[Celery]:
    """Yield an app from :func:`make_app` whose queues exist; close it after the block."""
    app = make_app(method, url, confirm=confirm, **settings)
    if url.startswith("amqp"):
        declare_for(method, app)
    if url.startswith(SCHEME):
        # kombu takes a binding in the folder of another scenario for one in this folder.
        app.connection_for_write().transport.state.clear()
    yield app
    app.close()


def waiting_in(url: str) -> int:
    """Return the number of ready messages in the task queue."""
    with kombu.Connection(url) as connection:
        return int(connection.default_channel.queue_declare(QUEUE, passive=True).message_count)


def send_all(app: Celery, task: str, indexes: Iterable[int], **options: Any) -> None:
    """Send one task for each index, on one connection."""
    with app.producer_or_acquire() as producer:
        for index in indexes:
            app.tasks[task].apply_async((index,), producer=producer, **options)


# ---- the worker ----------------------------------------------------------------------------


class Worker:
    """A running worker, with the recorded starts of its tasks."""

    def __init__(self, record: Path, pid: int) -> None:
        self._record = record
        self.pid = pid

    def starts(self, last: int = 1 << 40) -> list[tuple[int, float]]:
        """Return the index and the Unix time of each start so far, or of the *last* ones."""
        with self._record.open("rb") as file:
            file.seek(max(self.start_count() - last, 0) * RECORD.size)
            data = file.read()
        return list(RECORD.iter_unpack(data[: len(data) // RECORD.size * RECORD.size]))

    def start_count(self) -> int:
        return self._record.stat().st_size // RECORD.size


@contextmanager
def running(
    method: str,
    url: str,
    conf: Mapping[str, Any],
    *command: str,
    log: Path | None = None,
    **more: str,
) -> Iterator[Any]:
    """Run a command of ``celery -A benchmarks.worker_app``, and yield its process.

    At the end of the block, it and all its child processes are ended. *conf* is configuration that
    can be written as JSON. Without *log*, the command's output is the process's *stdout*.
    """
    ours = {"BENCH_METHOD": method, "BENCH_URL": url, "BENCH_CONF": json.dumps(dict(conf))}
    process = subprocess.Popen(
        [sys.executable, "-m", "celery", "-A", "benchmarks.worker_app", *command],
        cwd=REPOSITORY,
        env=os.environ | ours | more,
        stdin=subprocess.DEVNULL,
        stdout=log.open("wb") if log else subprocess.PIPE,
        stderr=subprocess.STDOUT if log else None,
        start_new_session=True,  # Ctrl-C is for this process, which then ends the other one
    )
    try:
        yield process
    finally:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(STOP_SECONDS)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@contextmanager
def running_worker(
    method: str, url: str, folder: Path, *options: str, conf: Mapping[str, Any] | None = None
) -> Iterator[Worker]:
    """Run a worker for an app from :func:`make_app`, and yield the worker when it is ready.

    *options* are options of ``celery worker``.
    """
    record = folder / f"{method}-{monotonic():.6f}"
    record.touch()
    ready, log = record.with_suffix(".ready"), record.with_suffix(".log")
    command = ("worker", "--pool=prefork", "--concurrency=2", "--loglevel=WARNING", *options)
    files = {"BENCH_RECORD": str(record), "BENCH_READY": str(ready)}
    with running(method, url, conf or {}, *command, log=log, **files) as process:
        deadline = monotonic() + BOOT_SECONDS
        while not ready.exists():
            if process.poll() is not None or monotonic() > deadline:
                said = log.read_text(errors="replace")[-3000:]
                raise RuntimeError(f"the {method} worker did not start:\n{said}")
            sleep(0.05)
        yield Worker(record, process.pid)


def lateness_ms(
    bench: Bench,
    app: Celery,
    worker: Worker,
    countdowns: Sequence[float],
    what: str,
    *,
    per_second: int,
    sent_before: int,
    grace_seconds: float,
) -> list[float]:
    """Send one task for each countdown at a steady pace.

    Returns:
        The milliseconds from the due time of each task to its start; a task that has not started
        *grace_seconds* after the last due time is missing.
    """
    due: list[float] = []
    started = monotonic()
    for index, countdown in enumerate(countdowns):
        sleep(max(0.0, started + index / per_second - monotonic()))
        due.append(time() + countdown)
        app.tasks[TASK].apply_async((index,), countdown=countdown)
    patience = max(due) - time() + grace_seconds
    bench.wait_for(what, worker.start_count, len(due) + sent_before, timeout_seconds=patience)
    return [(at - due[index]) * 1000 for index, at in worker.starts() if index < len(due)]

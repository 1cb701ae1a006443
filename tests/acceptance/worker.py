"""Start workers and producers as processes, and read which tasks the workers ran."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any, Literal
from uuid import uuid4

from celery import Celery
from kombu import Connection

from celery_native_delay import install
from tests.acceptance.apps.tasks import CONF_VARIABLE, RECORD_VARIABLE, new_app
from tests.documents import ROOT as REPOSITORY
from tests.processes import output_of
from tests.waiting import PATIENCE_SECONDS, wait_until

#: Due times are rounded to milliseconds.
EARLY_SECONDS = 0.001

#: A busy machine alone delays no task longer than this; a task that waits for the next check of
#: parked messages is later. The benchmarks measure lateness on a quiet machine.
LATE_SECONDS = PATIENCE_SECONDS

#: Delay levels: up to 1,023 s. To declare and delete the 31 of the default takes seconds; with
#: them run test_tasks, the conformance suite, the example project and the examples of the docs.
FEW_LEVELS = 13

#: Celery's command line without celery_native_delay.
_PLAIN_CELERY = (
    "import sys; sys.modules['celery_native_delay'] = None; "
    "from celery.__main__ import main; sys.exit(main())"
)
_PLAIN_PYTHON = "import sys; sys.modules['celery_native_delay'] = None; "


@dataclass(frozen=True)
class Run:
    """One execution of a task, noted by the worker when it started."""

    id: str
    name: str
    args: list[Any]
    started: float
    """Unix time."""
    eta: str | None
    expires: str | None
    delivery_info: dict[str, Any]
    headers: dict[str, Any] | None
    retries: int
    worker: str

    @property
    def due(self) -> float | None:
        """The Unix time of the ETA, None without ETA."""
        return datetime.fromisoformat(self.eta).timestamp() if self.eta else None

    def assert_on_time(self, earliest: float | None = None, latest: float | None = None) -> None:
        """Assert that it started not before *earliest* and soon after *latest*, both Unix times.

        By default *earliest* is the time of its ETA, and *latest* is *earliest*.
        """
        earliest = self.due if earliest is None else earliest
        assert earliest is not None, f"{self} has no ETA"
        latest = earliest if latest is None else latest
        assert self.started >= earliest - EARLY_SECONDS, f"{self} early"
        assert self.started <= latest + LATE_SECONDS, f"{self} late by {self.started - latest} s"


class Record:
    """Reads the file to which all workers append their runs."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._runs: list[Run] = []
        self._read_bytes = 0

    def runs(self, *, task_id: str | None = None, name: str | None = None) -> list[Run]:
        """All runs so far, or the runs of one task id or one task name."""
        if self.path.exists():
            with self.path.open("rb") as file:
                file.seek(self._read_bytes)
                # The last line may be incomplete.
                lines, end, _ = file.read().rpartition(b"\n")
            self._read_bytes += len(lines + end)
            self._runs += [Run(**json.loads(line)) for line in lines.splitlines()]
        return [run for run in self._runs if task_id in (None, run.id) and name in (None, run.name)]

    def wait_for(
        self, count: int = 1, *, timeout_seconds: float = PATIENCE_SECONDS, **which: Any
    ) -> list[Run]:
        """Wait until there are *count* runs; the caller asserts that there are no more."""
        wait_until(
            lambda: len(self.runs(**which)) >= count,
            timeout_seconds=timeout_seconds,
            telling=lambda: f"{len(self.runs(**which))} of {count} runs of {which or 'any task'}",
        )
        return self.runs(**which)

    def wait_for_ids(
        self, ids: list[str], *, timeout_seconds: float = PATIENCE_SECONDS
    ) -> dict[str, list[Run]]:
        """All runs by task id, once each of *ids* has run; fails if no new one runs for a while."""
        left = set(ids)
        while left:
            wait_until(
                lambda: not left.isdisjoint(run.id for run in self.runs()),
                timeout_seconds=timeout_seconds,
                telling=lambda: f"{len(left)} of {len(ids)} tasks have not run: {[*left][:5]}",
            )
            left.difference_update(run.id for run in self.runs())
        by_id: dict[str, list[Run]] = {task_id: [] for task_id in ids}
        for run in self.runs():
            by_id.setdefault(run.id, []).append(run)
        return by_id


@dataclass
class Worker:
    """A running worker process, or another command of Celery."""

    name: str
    """The node name, for ``inspect(destination=[…])``."""
    process: subprocess.Popen[bytes]
    log_file: Path

    @property
    def log(self) -> str:
        return self.log_file.read_text(errors="replace")

    def log_lines(self, *containing: str) -> list[str]:
        """Lines of the log that contain every text of *containing*."""
        lines = self.log.splitlines()
        return [line for line in lines if all(text in line for text in containing)]

    def wait_for_log(self, *containing: str, count: int = 1) -> None:
        wait_until(lambda: len(self.log_lines(*containing)) >= count, telling=lambda: containing)

    def wait_ready(self) -> None:
        def ready() -> bool:
            assert self.process.poll() is None, f"the worker ended with {self.process.poll()}"
            return " ready." in self.log

        wait_until(ready)

    def stop(self) -> None:
        """Stop the worker with a warm shutdown (SIGTERM)."""
        self.process.terminate()
        self.process.wait(PATIENCE_SECONDS)

    def kill(self) -> None:
        """Kill the worker and its pool with SIGKILL."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait(PATIENCE_SECONDS)


@dataclass
class Fleet:
    """Producers and workers on one broker with one configuration."""

    broker_url: str
    folder: Path
    conf: dict[str, Any] = field(default_factory=dict)
    shows_logs: bool = True
    """Prints the workers' logs when it is closed; pytest shows them for a failed test."""

    def __post_init__(self) -> None:
        self.record = Record(self.folder / "record.jsonl")
        self._stack = ExitStack()

    def app(self, *, installed: bool = True, **conf: Any) -> Celery:
        """An app in this process, for producing; closed with the fleet."""
        app = new_app(**({"broker_url": self.broker_url} | self.conf | conf))
        if installed:
            install(app)
        self._stack.callback(app.close)
        return app

    def worker(
        self,
        *,
        queues: str | None = None,
        pool: Literal["prefork", "threads", "solo", "gevent"] = "prefork",
        concurrency: int = 2,
        installed: bool = True,
        name: str = "",
        wait: bool = True,
        more: tuple[str, ...] = (),
        **conf: Any,
    ) -> Worker:
        """Start a worker; closing the fleet kills it if it still runs."""
        name = f"{name or 'worker'}-{uuid4().hex[:6]}@localhost"
        options = [f"--hostname={name}", "--loglevel=INFO", f"--pool={pool}"]
        options += [f"--concurrency={concurrency}", "--without-mingle", "--without-gossip"]
        options += [f"--queues={queues}"] if queues else []
        worker = self.command("worker", *options, *more, installed=installed, name=name, **conf)
        if wait:
            worker.wait_ready()
        return worker

    def command(
        self,
        *words: str,
        installed: bool = True,
        name: str = "",
        environment: dict[str, str] | None = None,
        **conf: Any,
    ) -> Worker:
        """Start another command of Celery, such as beat; closing the fleet kills it."""
        module = "installed" if installed else "plain"
        celery = ["-m", "celery"] if installed else ["-c", _PLAIN_CELERY]
        name = name or f"{words[0]}-{uuid4().hex[:6]}"
        log_file = self.folder / f"{name}.log"
        with log_file.open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, *celery, "-A", f"tests.acceptance.apps.{module}", *words],
                cwd=REPOSITORY,
                env=self.environment(**conf) | (environment or {}),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        worker = Worker(name, process, log_file)
        if self.shows_logs:
            self._stack.callback(self._show, worker)
        self._stack.callback(worker.kill)  # a warm shutdown takes 2-4 s
        return worker

    def produce(self, code: str, *, installed: bool = False, **conf: Any) -> str:
        """Run *code*, which uses ``app``, in a producer process; returns its output.

        A plain producer on RabbitMQ waits for confirms: when a producer just ends, a busy
        broker may drop all but its first 32 messages.
        """
        if not installed and self.broker_url.startswith("amqp"):
            conf = {"broker_transport_options": {"confirm_publish": True}} | conf
        module = "installed" if installed else "plain"
        names = f"from tests.acceptance.apps.{module} import app\n"
        program = ("" if installed else _PLAIN_PYTHON) + names + code
        return output_of(sys.executable, "-c", program, env=self.environment(**conf))

    def held_by(self, *workers: Worker) -> list[Any]:
        """The tasks that workers hold in memory until they are due, asked by remote control."""
        names = [worker.name for worker in workers]
        inspect = self._asking.control.inspect(destination=names, timeout=10)
        answers = wait_until(
            lambda: found if len(found := inspect.scheduled() or {}) == len(names) else None
        )
        return [task for held in answers.values() for task in held]

    @cached_property
    def _asking(self) -> Celery:
        return self.app(installed=False)

    def depth(self, queue: str) -> int:
        """The number of messages in a queue, asked by AMQP because the management API lags.

        0 if there is no such queue. Unacknowledged messages of a running worker do not count.
        """
        with Connection(self.broker_url) as connection:
            channel = connection.default_channel
            try:
                return int(channel.queue_declare(queue, passive=True).message_count)
            except connection.channel_errors:
                return 0

    def close(self) -> None:
        self._stack.close()

    @staticmethod
    def _show(worker: Worker) -> None:
        sys.stdout.write(f"---- log of {worker.name} ----\n{worker.log}\n")

    def environment(self, **conf: Any) -> dict[str, str]:
        """Environment variables for a process whose app has this configuration."""
        mine = {
            CONF_VARIABLE: json.dumps({"broker_url": self.broker_url} | self.conf | conf),
            RECORD_VARIABLE: str(self.record.path),
        }
        inherited = {k: v for k, v in os.environ.items() if not k.startswith("CELERY_")}
        return inherited | mine


@contextmanager
def fleet_on(broker_url: str, folder: Path, **conf: Any) -> Iterator[Fleet]:
    """A fleet; its workers and apps end with the block.

    On RabbitMQ with binary levels unless *conf* changes it: that halves the number of queues.
    """
    fleet = Fleet(broker_url, folder, {"native_delay_fused_bits": 0} | conf)
    try:
        yield fleet
    finally:
        fleet.close()

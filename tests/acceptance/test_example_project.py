"""The example project as a user runs it: a worker, a producer and a broker, each a process."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from celery_native_delay.testing import require_rabbitmq, require_redis
from example_project.private_sqs import require_sqs
from pytest_celery_native_delay import installed
from tests.acceptance.worker import LATE_SECONDS
from tests.brokers import in_ci
from tests.waiting import PATIENCE_SECONDS, wait_until

REPOSITORY = Path(__file__).resolve().parent.parent.parent


class Shop:
    """The example project on one broker: its environment, its producer and what it recorded."""

    def __init__(self, broker_url: str, folder: Path) -> None:
        self.record = folder / "record.jsonl"
        self.log = folder / "worker.log"
        self.environment = os.environ | {
            "BROKER_URL": broker_url,
            "EXAMPLE_RECORD": str(self.record),
        }

    @contextmanager
    def worker(self, queue: str) -> Iterator[None]:
        """A worker that consumes *queue* and no other."""
        command = [sys.executable, "-m", "celery", "-A", "example_project.app", "worker"]
        with self.log.open("wb") as output:
            worker = subprocess.Popen(
                [*command, "--concurrency=1", "--loglevel=INFO", f"--queues={queue}"],
                cwd=REPOSITORY,
                env=self.environment,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        try:
            wait_until(lambda: " ready." in self.log.read_text())
            yield
        finally:
            worker.terminate()
            try:
                worker.wait(PATIENCE_SECONDS)
            except subprocess.TimeoutExpired:
                worker.kill()
                worker.wait()
                pytest.fail(f"the worker did not end:\n{self.log.read_text()}")

    def send(self, call: str) -> None:
        """Evaluate *call*, an expression in terms of the example's tasks, in a new process."""
        names = "from datetime import *; from example_project.tasks import *"
        subprocess.run(
            [sys.executable, "-c", f"{names}; {call}"],
            cwd=REPOSITORY,
            env=self.environment,
            check=True,
            timeout=PATIENCE_SECONDS,
        )

    def starts(self) -> list[dict[str, Any]]:
        """What the worker recorded so far, one entry for each attempt it started."""
        lines = self.record.read_text().splitlines() if self.record.exists() else []
        return [json.loads(line) for line in lines]

    def wait_for_starts(self, count: int) -> None:
        wait_until(lambda: len(self.starts()) >= count)


@pytest.fixture
def shop(vhost_url: str, tmp_path: Path) -> Shop:
    return Shop(vhost_url, tmp_path)


def seconds_late(start: dict[str, Any]) -> float:
    return start["started"] - start["due"]


def test_a_reminder_runs_two_days_before_the_delivery(shop: Shop) -> None:
    """Given a delivery in two days and two seconds, the reminder runs in two seconds, once."""
    with shop.worker("reminders"):
        shop.send("remind_before_delivery(7, datetime.now(UTC) + timedelta(days=2, seconds=2))")
        shop.wait_for_starts(1)

    (start,) = shop.starts()
    assert 0 <= seconds_late(start) <= LATE_SECONDS
    assert start["delivery_info"]["exchange"] == "shop"
    assert start["delivery_info"]["routing_key"] == "reminders.order"


@pytest.mark.ci
@pytest.mark.parametrize(
    ("queue", "call"),
    [
        pytest.param(
            "emails",
            "send_email.delay('ann@example.com', 'Thank you', busy_attempts=2)",
            id="autoretry with back-off and jitter",
        ),
        pytest.param(
            "default",
            "charge.delay(7, declined_attempts=2, retry_seconds=1)",
            id="retry with a countdown",
        ),
    ],
)
def test_a_retry_returns_to_its_queue(shop: Shop, queue: str, call: str) -> None:
    """Every attempt reaches the only queue the worker consumes, on time and once."""
    with shop.worker(queue):
        shop.send(call)
        shop.wait_for_starts(3)

    starts = shop.starts()
    assert [start["retries"] for start in starts] == [0, 1, 2]
    assert len({start["id"] for start in starts}) == 1
    for start in starts[1:]:
        assert start["delivery_info"] == starts[0]["delivery_info"]
        if start["due"] is not None:  # jitter may choose no delay at all
            assert 0 <= seconds_late(start) <= LATE_SECONDS


@pytest.fixture(params=["rabbitmq", in_ci("embedded"), in_ci("filesystem"), in_ci("sqs")])
def demo_on(request: pytest.FixtureRequest) -> str:
    """A broker that `make demo BROKER=…` brings itself."""
    if request.param == "rabbitmq":
        installed(require_rabbitmq)
        installed(require_redis)  # its records
    elif request.param == "sqs":
        installed(require_sqs)
    elif request.param == "embedded":
        installed(require_redis, embedded=True)
    return str(request.param)


class TestDemo:
    """`make demo`, which brings a broker of its own."""

    def test_succeeds_and_leaves_nothing_running(self, demo_on: str) -> None:
        mark = uuid4().hex
        demo = start_demo(mark, demo_on)
        output, _ = demo.communicate(timeout=2 * PATIENCE_SECONDS)
        assert demo.returncode == 0, output
        # SQS has no place for keys and lines: three calls under one, and three bookings.
        tasks, runs = (15, 19) if demo_on == "sqs" else (21, 25)
        told = f"{tasks} tasks in {runs} runs: {runs} on time, 0 early"
        assert output.splitlines()[-1].startswith(told)
        assert processes_with(mark) == []

    @pytest.mark.ci
    def test_leaves_nothing_running_after_ctrl_c(self, demo_on: str) -> None:
        mark = uuid4().hex
        demo = start_demo(mark, demo_on)
        assert demo.stdout is not None
        for line in demo.stdout:
            if re.search(r" of \d+ ran", line):  # broker, worker and producer are at work
                break
        demo.send_signal(signal.SIGINT)
        demo.communicate(timeout=PATIENCE_SECONDS)
        assert demo.returncode == 128 + signal.SIGINT
        assert processes_with(mark) == []

    def test_says_what_it_knows_when_asked_for_something_else(self) -> None:
        demo = start_demo(uuid4().hex, "kafka")
        output, _ = demo.communicate(timeout=PATIENCE_SECONDS)
        assert demo.returncode == 2
        assert "filesystem, sqs or a url, got 'kafka'" in " ".join(output.split())

    @pytest.mark.parametrize("url", ["redis://127.0.0.1:1/0", "amqp://127.0.0.1:1//"])
    def test_a_broker_that_is_not_there_is_one_sentence(self, url: str) -> None:
        demo = start_demo(uuid4().hex, url)
        output, _ = demo.communicate(timeout=PATIENCE_SECONDS)
        assert demo.returncode == 2, output
        assert "Traceback" not in output
        assert "is it running, and is the URL right?" in " ".join(output.split())


def start_demo(mark: str, broker: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-u", "-m", "example_project.demo", broker],
        cwd=REPOSITORY,
        env=os.environ | {"MARK": mark, "DEMO_BUSY_MS": "10000"},  # other tests run beside it
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def processes_with(mark: str) -> list[str]:
    """Command lines of all processes whose environment holds *mark*, as children inherit it."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if mark.encode() in (process / "environ").read_bytes():
                found.append((process / "cmdline").read_text().replace("\0", " "))
        except OSError:  # ended meanwhile, or somebody else's
            continue
    return found


def test_every_task_that_is_routed_or_scheduled_exists() -> None:
    from example_project.app import app

    app.loader.import_default_modules()
    scheduled = {entry["task"] for entry in app.conf.beat_schedule.values()}
    assert scheduled | set(app.conf.task_routes) <= set(app.tasks)

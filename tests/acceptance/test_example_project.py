"""The example project as a user runs it: worker, producer and broker are processes."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from uuid import uuid4

import pytest

from celery_native_delay.testing import require_rabbitmq, require_redis
from example_project.private_sqs import require_sqs
from pytest_celery_native_delay import installed
from tests.acceptance.worker import REPOSITORY
from tests.brokers import in_ci
from tests.waiting import PATIENCE_SECONDS


@pytest.fixture(params=["rabbitmq", in_ci("embedded"), in_ci("sqs")])
def demo_on(request: pytest.FixtureRequest) -> str:
    """A broker that `make demo BROKER=…` starts itself."""
    if request.param == "rabbitmq":
        installed(require_rabbitmq)
    elif request.param == "sqs":
        installed(require_sqs)
    elif request.param == "embedded":
        installed(require_redis, embedded=True)
    return str(request.param)


class TestDemo:
    """`make demo`, which starts a broker itself."""

    def test_succeeds_and_leaves_nothing_running(self, demo_on: str) -> None:
        mark = uuid4().hex
        demo = start_demo(mark, demo_on)
        output, _ = demo.communicate(timeout=2 * PATIENCE_SECONDS)
        assert demo.returncode == 0, output
        # SQS has no keys and rates: without three keyed calls, bookings and ticks.
        tasks, runs = (15, 19) if demo_on == "sqs" else (24, 28)
        told = f"{tasks} tasks in {runs} runs: {runs} on time, 0 early"
        assert any(line.startswith(told) for line in output.splitlines()[-2:])
        assert processes_with(mark) == []

    @pytest.mark.ci
    @pytest.mark.parametrize("demo_on", ["rabbitmq"], indirect=True)
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

    def test_an_unknown_broker_is_refused_with_the_known_ones(self) -> None:
        demo = start_demo(uuid4().hex, "kafka")
        output, _ = demo.communicate(timeout=PATIENCE_SECONDS)
        assert demo.returncode == 2
        assert "filesystem, sqs or a url, got 'kafka'" in " ".join(output.split())

    @pytest.mark.parametrize("url", ["redis://127.0.0.1:1/0", "amqp://127.0.0.1:1//"])
    def test_an_unreachable_broker_is_reported_in_one_sentence(self, url: str) -> None:
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
    """Command lines of all processes whose environment holds *mark*; child processes inherit it."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if mark.encode() in (process / "environ").read_bytes():
                found.append((process / "cmdline").read_text().replace("\0", " "))
        except OSError:  # ended by now, or of another user
            continue
    return found


def test_every_task_that_is_routed_or_scheduled_exists() -> None:
    from example_project.app import app

    app.loader.import_default_modules()
    scheduled = {entry["task"] for entry in app.conf.beat_schedule.values()}
    assert scheduled | set(app.conf.task_routes) <= set(app.tasks)

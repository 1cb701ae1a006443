"""The example project as a user runs it: worker, producer and broker are processes."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from uuid import uuid4

import pytest

from celery_native_delay.testing import require_rabbitmq, require_redis
from example_project.private_sqs import require_sqs
from pytest_celery_native_delay import installed
from tests.brokers import in_ci
from tests.documents import ROOT
from tests.processes import processes_of
from tests.waiting import PATIENCE_SECONDS


def start_demo(mark: str, broker: str) -> subprocess.Popen[str]:
    """Start ``make demo BROKER=…``, which starts a broker itself."""
    return subprocess.Popen(
        [sys.executable, "-u", "-m", "example_project.demo", broker],
        cwd=ROOT,
        env=os.environ | {"MARK": mark, "DEMO_BUSY_MS": "10000"},  # other tests run beside it
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.mark.parametrize("broker", ["rabbitmq", in_ci("embedded"), in_ci("sqs")])
def test_the_demo_succeeds_and_leaves_nothing_running(broker: str) -> None:
    if broker == "embedded":
        installed(require_redis, embedded=True)
    else:
        installed(require_sqs if broker == "sqs" else require_rabbitmq)
    mark = uuid4().hex
    demo = start_demo(mark, broker)
    output, _ = demo.communicate(timeout=2 * PATIENCE_SECONDS)
    assert demo.returncode == 0, output
    # SQS has no keys and rates: without three keyed calls, bookings and ticks.
    tasks, runs = (15, 19) if broker == "sqs" else (24, 28)
    told = f"{tasks} tasks in {runs} runs: {runs} on time, 0 early"
    assert any(line.startswith(told) for line in output.splitlines()[-2:])
    assert processes_of(mark) == []


@pytest.mark.ci
def test_the_demo_leaves_nothing_running_after_ctrl_c() -> None:
    installed(require_rabbitmq)
    mark = uuid4().hex
    demo = start_demo(mark, "rabbitmq")
    for line in demo.stdout:
        if re.search(r" of \d+ ran", line):  # broker, worker and producer are at work
            break
    demo.send_signal(signal.SIGINT)
    demo.communicate(timeout=PATIENCE_SECONDS)
    assert demo.returncode == 128 + signal.SIGINT
    assert processes_of(mark) == []


@pytest.mark.parametrize(
    ("broker", "said"),
    [
        ("kafka", "filesystem, sqs or a url, got 'kafka'"),
        ("redis://127.0.0.1:1/0", "is it running, and is the URL right?"),
        ("amqp://127.0.0.1:1//", "is it running, and is the URL right?"),
    ],
)
def test_an_unusable_broker_is_reported_in_one_sentence(broker: str, said: str) -> None:
    demo = start_demo(uuid4().hex, broker)
    output, _ = demo.communicate(timeout=PATIENCE_SECONDS)
    assert demo.returncode == 2, output
    assert "Traceback" not in output
    assert said in " ".join(output.split())


def test_every_task_that_is_routed_or_scheduled_exists() -> None:
    from example_project.app import app

    app.loader.import_default_modules()
    scheduled = {entry["task"] for entry in app.conf.beat_schedule.values()}
    assert scheduled | set(app.conf.task_routes) <= set(app.tasks)

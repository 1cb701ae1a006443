"""SQS (moto): ``delay declare | doctor | status | purge | promote``."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from celery_native_delay import register_transports
from example_project.private_sqs import PrivateSqs
from tests.integration.project import Project
from tests.integration.sqs_traffic import SHORT_HOPS, delaying, url_of, waiting_on
from tests.traffic import PATIENCE_SECONDS, inbox, publish
from tests.waiting import wait_until

pytestmark = [pytest.mark.ci, pytest.mark.usefixtures("short_hops")]

APP = """
from celery import Celery
from kombu import Queue
from celery_native_delay import install

app = install(Celery("shop", broker={url!r}))
app.conf.update(task_queues=[Queue("jobs"), Queue("jobs.fifo")], **{settings!r})
"""

NAME = "jobs-delay.fifo"


@pytest.fixture
def sqs(shared_sqs: PrivateSqs) -> PrivateSqs:
    register_transports()
    shared_sqs.wipe()
    return shared_sqs


@pytest.fixture
def shop(tmp_path: Path, sqs: PrivateSqs) -> Project:
    return Project(tmp_path).write(APP + SHORT_HOPS, sqs.url)


def test_declare_creates_the_delay_queues_that_doctor_misses(
    shop: Project, sqs: PrivateSqs
) -> None:
    found = shop.told("doctor", status=1)
    assert found["findings"] == [
        {
            "check": "delay queues",
            "level": "wrong",
            "problem": f"{NAME}: missing",
            "remedy": "run `celery -A PROJ delay declare`, which creates it",
        }
    ]
    assert shop.told("declare") == {"queues": [NAME], "lacking": []}
    assert shop.lines("declare") == [f"{NAME}: ready"]
    assert shop.lines("doctor")[-1] == "healthy"
    sqs.client.set_queue_attributes(
        QueueUrl=url_of(sqs, NAME), Attributes={"MessageRetentionPeriod": "60"}
    )
    (finding,) = shop.told("doctor", status=1)["findings"]
    assert finding["problem"] == f"{NAME}: MessageRetentionPeriod is 60, expected 1209600"
    assert finding["remedy"].startswith("aws sqs set-queue-attributes ")


def test_status_counts_by_queue_and_purge_empties_delay_queues_only(
    shop: Project, sqs: PrivateSqs
) -> None:
    shop.delay("declare")
    with delaying(sqs.url) as connection:
        publish(connection, "near", "jobs", delay=1)
        for _ in range(2):
            publish(connection, "far", "jobs", delay=3600)
        assert shop.told("status")["queues"][0]["on_the_way"] == 2
        # A hop takes a second here, and no relay runs.
        wait_until(lambda: shop.told("status")["overdue"] == 2, timeout_seconds=PATIENCE_SECONDS)
        told = shop.told("status")
        assert (told["name"], told["waiting"], told["parked"]) == (NAME, 2, 0)
        *counts, problem, remedy = shop.lines("status")
        assert counts == [
            "queue waiting here in its delay queue",
            "jobs 0 2",
            "waiting about 2",
            "next due unknown (SQS does not tell)",
            "overdue about 2",
        ]
        assert problem.startswith(f"wrong: relaying: {NAME}: about 2 message(s) have done their")
        assert "run `celery -A PROJ delay promote`" in remedy
        assert shop.told("purge", "--force") == {"name": NAME, "purged": 2}
        assert waiting_on(sqs) == 0
        with inbox(connection, "jobs") as received:
            assert received.wait_for(1)[0].body == "near"
    assert shop.told("parked", "list") == {"parked": 0, "messages": []}


def test_uninstall_deletes_empty_delay_queues_only(shop: Project, sqs: PrivateSqs) -> None:
    shop.lines("declare")
    source = (shop.folder / "shop.py").read_text()
    (shop.folder / "shop.py").write_text(f"{source}\napp.conf.native_delay_enabled = 'drain'\n")
    with delaying(sqs.url) as connection:
        publish(connection, "far", "jobs", delay=3600)
        refused = shop.delay("uninstall", "--yes")
        assert refused.returncode == 1
        assert "1 task(s) wait" in refused.stderr
        shop.delay("purge", "--yes")
    assert shop.lines("uninstall", "--yes") == [f"removed {NAME}"]
    assert NAME not in str(sqs.client.list_queues())
    assert shop.lines("uninstall", "--yes") == ["nothing to remove"]


def test_a_relay_as_a_process_of_its_own(shop: Project, sqs: PrivateSqs) -> None:
    """It creates the delay queue, and until SIGTERM relays and counts messages."""
    command = [sys.executable, "-m", "celery", "-A", "shop", "delay", "promote", "-Q", "jobs"]
    with subprocess.Popen(command, cwd=shop.folder, stdout=subprocess.PIPE, text=True) as relay:
        assert relay.stdout is not None
        assert relay.stdout.readline().startswith("promote runs: sqs://private:**@127.0.0.1")
        with delaying(sqs.url) as connection, inbox(connection, "jobs") as received:
            publish(connection, "hello", "jobs", delay=2.5)
            (arrival,) = received.wait_for(1)
        relay.send_signal(signal.SIGTERM)
        assert relay.stdout.read() == "1 message(s) promoted, 0 parked\n"
    assert relay.returncode == 0
    assert arrival.lateness_seconds >= 0

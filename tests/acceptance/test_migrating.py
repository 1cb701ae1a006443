"""Migration under traffic: waiting tasks move while the migrating process is killed repeatedly."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from math import inf
from threading import Event, Thread
from time import time

import pytest

from celery_native_delay.testing import PrivateRabbitMQ
from tests.acceptance.worker import REPOSITORY, Fleet
from tests.brokers import on_one_version
from tests.waiting import PATIENCE_SECONDS

pytestmark = pytest.mark.ci

TASKS = int(os.environ.get("NATIVE_DELAY_TEST_MIGRATED", "400"))
"""How many tasks wait when the migration begins; for a run by hand: 20,000."""

EARLIEST_SECONDS = 3 if TASKS <= 1000 else TASKS // 60
SPREAD_SECONDS = max(20, TASKS // 100)
"""Due times begin after EARLIEST_SECONDS, with many tasks after the migration."""

KILLED_EVERY_SECONDS = 2.0

LIVE_KILLS, MOST_KILLS = 3 + TASKS // 1000, 6 + TASKS // 150
"""After so many kills all producers end: each run would find their new tasks; and the next run may
finish, however slow the machine."""

EARLIER = {"native_delay_namespace": "old_delay"}
RATE = ["--rate", str(TASKS // 7)]
"""Slow enough that the first run is killed before it ends, on any machine."""

MIGRATE = ["delay", "migrate", "--from", "namespace:old_delay", "--yes", "--json", *RATE]

#: The command prints "begins" after its imports, which are slow on a busy machine.
RUN = f"""
import sys
import celery_native_delay.transports.rabbitmq.moving, tests.acceptance.apps.installed
from celery.__main__ import main
print("begins", flush=True)
sys.argv = ["celery", "-A", "tests.acceptance.apps.installed", *{MIGRATE!r}]
main()
"""

TO_ORDERS = {"exchange": "shop", "exchange_type": "topic", "routing_key": "orders.new"}

#: Code for a producer.
SEND = f"""
import json
from random import Random
from time import time

random, sent = Random(1), {{}}
with app.producer_pool.acquire(block=True) as producer:
    for number in range({TASKS}):
        before, seconds = time(), {EARLIEST_SECONDS} + random.random() * {SPREAD_SECONDS}
        options = {{"countdown": seconds, "producer": producer, **{TO_ORDERS}}}
        sent[app.send_task("note", ("x",), **options).id] = before + seconds
print(json.dumps(sent))
"""


@on_one_version
def test_killed_migrations_lose_nothing(fleet: Fleet, rabbitmq: PrivateRabbitMQ) -> None:
    """Old and new producers and workers go on meanwhile: each task runs, never early."""
    fleet.conf |= {
        "queue_type": "quorum",
        "native_delay_management_url": rabbitmq.management_url,
        "native_delay_levels": 16,
    }
    fleet.worker(concurrency=4)
    sent: dict[str, float] = json.loads(fleet.produce(SEND, installed=True, **EARLIER))
    over = Event()
    live = Thread(target=send_on, args=(fleet, over, sent))
    live.start()
    try:
        kills, told = migrate_and_kill(fleet, over)
    finally:
        over.set()
        live.join(PATIENCE_SECONDS)
    patience = EARLIEST_SECONDS + SPREAD_SECONDS + PATIENCE_SECONDS
    runs = fleet.record.wait_for_ids(list(sent), timeout_seconds=patience)

    doubled = {task_id for task_id, each in runs.items() if len(each) > 1}
    assert kills
    for task_id, due in sent.items():
        runs[task_id][0].assert_on_time(due, inf)
    # A doubled task that no run reported had left its level before the next run looked there.
    assert len(doubled) <= kills
    assert len(told) <= kills
    last, _ = run_migration(fleet).communicate(timeout=PATIENCE_SECONDS)
    assert json.loads(last)["moved"] == 0


def send_on(fleet: Fleet, over: Event, sent: dict[str, float]) -> None:
    """Delay tasks with both namespaces while the migration runs."""
    apps = [fleet.app(), fleet.app(**EARLIER)]
    while not over.wait(0.1):
        for app in apps:
            due = time() + 5
            sent[app.send_task("note", ("x",), countdown=5, **TO_ORDERS).id] = due


def migrate_and_kill(fleet: Fleet, over: Event) -> tuple[int, set[str]]:
    """Run the migration and kill it, until one run ends; after LIVE_KILLS the producers end.

    Returns the number of killed runs, and the ids that a run reported as possibly running twice.
    """
    kills, doubtful = 0, set[str]()
    while True:
        process = run_migration(fleet)
        try:
            patience = KILLED_EVERY_SECONDS if kills < MOST_KILLS else PATIENCE_SECONDS
            _, err = process.communicate(timeout=patience)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            _, err = process.communicate()
        doubtful |= set(re.findall(r"^may run twice.*: (.+)$", err.decode(), re.M))
        if process.returncode != -signal.SIGKILL:
            assert process.returncode == 0, err
            return kills, doubtful
        kills += 1
        if kills >= LIVE_KILLS:
            over.set()


def run_migration(fleet: Fleet) -> subprocess.Popen[bytes]:
    process = subprocess.Popen(
        [sys.executable, "-c", RUN],
        cwd=REPOSITORY,
        env=fleet.environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"begins\n"
    return process

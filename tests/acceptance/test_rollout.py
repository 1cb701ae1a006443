"""Mixed fleets: some producers and workers have the package, others do not."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from time import time
from types import SimpleNamespace
from typing import Any

import pytest

from celery_native_delay import Delay
from celery_native_delay.testing import PrivateRabbitMQ, PrivateRedis
from celery_native_delay.transports.redis.keys import RedisBrokerKeys
from tests.acceptance.worker import REPOSITORY, Fleet, fleet_on
from tests.brokers import on_one_version
from tests.documents import EXAMPLES, only
from tests.waiting import PATIENCE_SECONDS, wait_until

EARLY_TASKS = 1_000

ROUTES: dict[str, dict[str, Any]] = {
    "default": {},
    "topic": {"exchange": "shop", "routing_key": "orders.new"},
    "direct": {"exchange": "billing", "routing_key": "invoice.new"},
    "fanout": {"exchange": "broadcast", "routing_key": ""},
}


@on_one_version
def test_a_plain_worker_runs_tasks_delayed_by_an_installed_producer(fleet: Fleet) -> None:
    """A worker without the package ignores everything that the producer adds."""
    worker = fleet.worker(installed=False, concurrency=3)
    assert "native delay" not in worker.log
    app = fleet.app()
    sent = {}
    for route, options in ROUTES.items():
        before = time()
        result = app.tasks["note"].apply_async((route,), countdown=1.5, **options)
        sent[route] = result.id, before, time()

    runs = fleet.record.wait_for_ids([task_id for task_id, _, _ in sent.values()])
    for task_id, before, after in sent.values():
        (run,) = runs[task_id]
        run.assert_on_time(before + 1.5, after + 1.5)


SEND_MANY = """
from datetime import UTC, datetime, timedelta
import json, time
note = app.tasks["note"]
ids = []
due = datetime.now(UTC) + timedelta(seconds={seconds})
with app.producer_pool.acquire(block=True) as producer:
    for number in range({count}):
        eta = due + timedelta(milliseconds=number % 2000)
        ids.append(note.apply_async(("early",), eta=eta, producer=producer, **{options}).id)
print(json.dumps(ids))
"""


@on_one_version
def test_an_installed_worker_puts_early_tasks_back_into_the_broker(
    fleet: Fleet, rabbitmq: PrivateRabbitMQ, vhost: str
) -> None:
    """1,100 tasks of a plain producer: the worker holds none, and each due task runs once."""
    worker = fleet.worker(concurrency=3)
    app = fleet.app()
    inspect = app.control.inspect(destination=[worker.name], timeout=10)
    prefetch = inspect.stats()[worker.name]["prefetch_count"]

    far = json.loads(fleet.produce(SEND_MANY.format(seconds=600, count=EARLY_TASKS, options={})))
    assert len(set(far)) == EARLY_TASKS

    # While the worker has them all to put back, an immediate task is not held up by them.
    fleet.record.wait_for(task_id=app.tasks["note"].delay("now").id)

    def all_wait_in_the_broker() -> bool:
        queues = rabbitmq.queues(vhost)
        waiting = sum(q.get("messages", 0) for q in queues if q["name"].startswith("celery_delay."))
        (own,) = [q for q in queues if q["name"] == "default"]
        return waiting >= EARLY_TASKS and own.get("messages") == 0

    wait_until(all_wait_in_the_broker)
    assert inspect.scheduled() == {worker.name: []}
    assert inspect.stats()[worker.name]["prefetch_count"] == prefetch

    ids = json.loads(fleet.produce(SEND_MANY.format(seconds=4, count=100, options={})))
    runs = fleet.record.wait_for_ids(ids)
    for task_id in ids:
        (run,) = runs[task_id]
        assert run.due is not None
        run.assert_on_time(run.due)
    assert not runs.keys() & set(far)
    assert worker.log_lines("ERROR") == []


@on_one_version
def test_a_task_of_protocol_1_waits_in_the_broker(
    fleet: Fleet, rabbitmq: PrivateRabbitMQ, vhost: str
) -> None:
    """The ETA is in the body, where a producer does not look: the worker puts the task back."""
    worker = fleet.worker()
    inspect = fleet.app().control.inspect(destination=[worker.name], timeout=10)
    code = (
        "import time\n"
        "app.tasks['note'].apply_async(('far',), countdown=600)\n"
        "before = time.time()\n"
        "result = app.tasks['note'].apply_async(('one',), countdown=3)\n"
        "print(result.id, before, time.time())"
    )
    printed = fleet.produce(code, installed=True, task_protocol=1)
    task_id, before, after = printed.split()
    (run,) = fleet.record.wait_for(task_id=task_id)
    run.assert_on_time(float(before) + 3, float(after) + 3)

    def the_far_one_waits() -> bool:  # adopted, if it was not delayed already
        queues = rabbitmq.queues(vhost)
        return sum(q.get("messages", 0) for q in queues if "level-" in q["name"]) == 1

    wait_until(the_far_one_waits)
    assert inspect.scheduled() == {worker.name: []}
    assert [run.id for run in fleet.record.runs()] == [task_id]


@on_one_version
@pytest.mark.ci
def test_celery_handles_expired_and_revoked_early_tasks(
    fleet: Fleet, tmp_path_factory: Any
) -> None:
    """Celery stores their results; such a task is not put back."""
    results = tmp_path_factory.mktemp("results")
    fleet.conf["result_backend"] = f"file://{results}"
    app = fleet.app()
    worker = fleet.worker()
    app.control.revoke("revoked-1", destination=[worker.name])
    inspect = app.control.inspect(destination=[worker.name], timeout=10)

    wait_until(lambda: inspect.revoked() == {worker.name: ["revoked-1"]})
    code = (
        "from datetime import UTC, datetime, timedelta\n"
        "now = datetime.now(UTC)\n"
        "note = app.tasks['note']\n"
        "note.apply_async(('x',), countdown=3, task_id='revoked-1')\n"
        "note.apply_async(('x',), countdown=3, task_id='expired-1', expires=now - timedelta(1))\n"
        "note.apply_async(('x',), countdown=3, task_id='expires-1', expires=1)\n"
        "print(note.apply_async(('x',), countdown=3).id)\n"
    )
    good_id = fleet.produce(code).strip()

    def all_revoked() -> bool:
        ids = ("revoked-1", "expired-1", "expires-1")
        return [app.AsyncResult(task_id).state for task_id in ids] == ["REVOKED"] * 3

    wait_until(all_revoked)
    fleet.record.wait_for(task_id=good_id)
    assert [run.id for run in fleet.record.runs()] == [good_id]


@on_one_version
@pytest.mark.ci
def test_tasks_waiting_in_celerys_own_levels_run_after_the_upgrade(fleet: Fleet) -> None:
    """With quorum queues Celery delays natively itself; its waiting tasks and their retries run."""
    fleet.conf["queue_type"] = "quorum"
    plain = fleet.worker(installed=False)  # declares celery_delayed_0 to _27
    code = (
        "print(app.send_task('again', (3, 0.3), countdown={}, "
        "exchange='shop', exchange_type='topic', routing_key='orders.new').id)"
    )
    task_id = fleet.produce(code.format(8)).strip()
    plain.stop()
    fleet.worker()
    ready = time()
    runs = fleet.record.wait_for(4, task_id=task_id)
    assert [run.retries for run in runs] == [0, 1, 2, 3]
    for run in runs:
        assert run.due is not None
        run.assert_on_time(run.due, max(run.due, ready))
    # And a plain producer that still uses them reaches an installed worker.
    early = fleet.produce(code.format(2)).strip()
    assert len(fleet.record.wait_for(4, task_id=early)) == 4


@pytest.mark.parametrize("server_name", ["redis"], indirect=True)
def test_the_rollback_page_works_as_shown(tmp_path: Path, empty_redis: PrivateRedis) -> None:
    """Drain, uninstall, remove: what waits runs or is held by a plain worker, and no key stays."""
    page = [example for example in EXAMPLES if example.page == "docs/guides/rollback.md"]
    console = "".join(example.text for example in page if example.language == "console")
    with fleet_on(empty_redis.url, tmp_path) as fleet:
        app = fleet.app()
        worker = fleet.worker()
        soon = app.send_task("note", ("soon",), countdown=20)
        far = app.send_task("note", ("far",), countdown=3600)
        gone = app.send_task("note", ("gone",), countdown=3600)
        worker.stop()

        shown = SimpleNamespace(conf=SimpleNamespace())
        exec(only("drain").text, {"app": shown})
        conf = vars(shown.conf)
        worker, draining = fleet.worker(**conf), fleet.app(**conf)
        delay = Delay(draining)
        fleet.record.wait_for(task_id=soon.id)
        assert delay.cancel(gone.id)
        assert delay.ids() == [far.id]
        keyed = delay.debounce(draining.signature("note", ("keyed",)), key="7", seconds=1)
        fleet.record.wait_for(task_id=keyed.id)
        for line in re.findall(r"^\$ (.+)$", console, re.M):
            words = shlex.split(line.replace("-A shop", "-A tests.acceptance.apps.installed"))
            done = subprocess.run(
                [sys.executable, "-m", *words],
                cwd=REPOSITORY,
                env=fleet.environment(**conf),
                input="y\n",
                capture_output=True,
                text=True,
                timeout=PATIENCE_SECONDS,
            )
            assert done.returncode == 0, done.stderr
        assert "1 task(s) moved to their queues" in done.stdout
        worker.stop()

        plain = fleet.worker(installed=False)
        inspect = fleet.app(installed=False).control.inspect([plain.name], timeout=10)

        def held() -> list[str]:
            return [each["request"]["id"] for each in (inspect.scheduled() or {})[plain.name]]

        wait_until(lambda: held() == [far.id])
        left = {key.decode() for key in empty_redis.client.keys("celery_delay*")}
        assert left <= {RedisBrokerKeys("", "celery_delay").promoting}, (
            "the heartbeat ends by itself"
        )
        assert len(fleet.record.wait_for(task_id=soon.id)) == 1

"""Mixed fleets: some producers and workers have the package, others do not."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path
from time import time
from types import SimpleNamespace
from typing import Any

import pytest

from celery_native_delay import Delay
from celery_native_delay.testing import PrivateRedis
from celery_native_delay.transports.redis.keys import RedisBrokerKeys
from tests.acceptance.worker import Fleet, fleet_on
from tests.brokers import on_one_version
from tests.documents import EXAMPLES, only
from tests.processes import output_of
from tests.waiting import wait_until

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
    note = fleet.app().tasks["note"]
    ids = [note.apply_async((name,), countdown=1.5, **how).id for name, how in ROUTES.items()]
    runs = fleet.record.wait_for_ids(ids)
    for task_id in ids:
        (run,) = runs[task_id]
        run.assert_on_time()


@on_one_version
@pytest.mark.ci
def test_celery_handles_expired_and_revoked_early_tasks(fleet: Fleet, tmp_path: Path) -> None:
    """Celery stores their results; such a task is not put back."""
    (tmp_path / "results").mkdir()
    fleet.conf["result_backend"] = f"file://{tmp_path}/results"
    app = fleet.app()
    worker = fleet.worker()
    app.control.revoke("revoked", destination=[worker.name])
    inspect = app.control.inspect(destination=[worker.name], timeout=10)
    wait_until(lambda: inspect.revoked() == {worker.name: ["revoked"]})
    code = (
        "def send(**options):\n"
        "    return app.send_task('note', ('x',), countdown=3, **options).id\n"
        "from datetime import UTC, datetime, timedelta\n"
        "send(task_id='revoked')\n"
        "send(task_id='expired', expires=datetime.now(UTC) - timedelta(1))\n"
        "send(task_id='expires', expires=1)\n"
        "print(send())"
    )
    good_id = fleet.produce(code).strip()
    for task_id in ("revoked", "expired", "expires"):
        wait_until(lambda task_id=task_id: app.AsyncResult(task_id).state == "REVOKED")
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
        run.assert_on_time(latest=max(run.due, ready))
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
            command = (sys.executable, "-m", *words)
            said = output_of(*command, env=fleet.environment(**conf), input="y\n")
        assert "1 task(s) moved to their queues" in said
        worker.stop()

        plain = fleet.worker(installed=False)
        wait_until(lambda: [each["request"]["id"] for each in fleet.held_by(plain)] == [far.id])
        left = {key.decode() for key in empty_redis.client.keys("celery_delay*")}
        heartbeat = RedisBrokerKeys("", "celery_delay").promoting  # it ends by itself
        assert left <= {heartbeat}
        assert len(fleet.record.wait_for(task_id=soon.id)) == 1

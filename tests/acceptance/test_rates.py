"""Rates of real workers: brokers that cannot count, an outage, other pools, failovers."""

from __future__ import annotations

from pathlib import Path
from time import time
from typing import Any

import pytest
from celery.contrib.testing.worker import start_worker

from celery_native_delay import Delay, NoStore, Rate, SettingsError, install
from celery_native_delay.testing import private_redis
from tests.acceptance.apps.tasks import new_app
from tests.acceptance.worker import Fleet, fleet_on
from tests.brokers import on_one_version
from tests.lines import LOOKED_AT, most_in_a_window
from tests.sentinel import private_sentinel
from tests.waiting import PATIENCE_SECONDS, wait_until

RATES = {"native_delay_rates": {"call_api": "50/10s"}}


@pytest.mark.ci
@on_one_version
def test_a_worker_that_cannot_keep_its_rates_does_not_start(fleet: Fleet) -> None:
    fleet.app().send_task("call_api", ("ada",))
    worker = fleet.worker(wait=False, **RATES)
    assert worker.process.wait(PATIENCE_SECONDS) != 0
    (line,) = worker.log_lines("keeps no keys, rates and schedules", "native_delay_store")
    assert line.startswith("Error: this worker does not start: ")
    assert "Traceback" not in worker.log
    assert fleet.record.runs() == []
    with pytest.raises(NoStore):
        Delay(fleet.app(**RATES)).rates()


@pytest.mark.parametrize(
    ("conf", "error"),
    [
        ({"native_delay_rates": {"call_api": "1/s"}}, NoStore),
        ({"native_delay_rates": {"call_api": "50/fortnight"}}, SettingsError),
        ({"native_delay_schedules": True}, NoStore),
        ({"native_delay_once": ["*"]}, NoStore),
    ],
)
def test_start_worker_raises_what_stops_a_worker(
    conf: dict[str, Any], error: type[Exception]
) -> None:
    """Without the error, start_worker would wait for ever."""
    app = new_app(broker_url="memory://", **conf)
    with pytest.raises(error), start_worker(install(app), perform_ping_check=False):
        pass


@on_one_version
def test_rated_tasks_wait_while_the_store_is_unreachable(fleet: Fleet) -> None:
    with private_redis() as records:
        conf = RATES | {"native_delay_store": records.url}
        app = fleet.app(**conf)
        worker = fleet.worker(**conf)
        first = app.send_task("call_api", ("ada",)).id
        fleet.record.wait_for_ids([first])
        records.stop()
        ids = [app.send_task("call_api", ("ada", number)).id for number in range(3)]
        other = app.send_task("note", (1,)).id
        fleet.record.wait_for_ids([other])
        worker.wait_for_log("rate-limited tasks wait until the rates can be read")
        assert {run.id for run in fleet.record.runs()} == {first, other}
        records.start()
        runs = fleet.record.wait_for_ids(ids)
        assert {len(runs[each]) for each in ids} == {1}
        assert len(worker.log_lines("rate-limited tasks wait until the rates can be read")) == 1
        wait_until(lambda: [line.waiting for line in Delay(app).rates()] == [0])


#: Unacknowledged messages of a killed worker come back after seconds, not after an hour.
SOON_BACK = {
    "visibility_timeout": 5,
    "unacked_restore_interval": 1,
    "unacked_restore_throttle": 1,
    "unacked_mutex_expire": 5,
}

#: A promoted replica may lack the starts of this many seconds before the failover.
UNHEARD_SECONDS = 1.0


@pytest.mark.ci
@pytest.mark.redis
def test_a_failover_loses_no_task_and_exceeds_the_rate_by_lost_starts_only(tmp_path: Path) -> None:
    """The master and a worker are killed together, while rate-limited tasks wait.

    A lost count of starts would allow a second burst.
    """
    given = {"limit": "40/12s", "key": "tenant", "burst": 15}
    rate = Rate(**given)
    with private_sentinel() as sentinel:
        conf: dict[str, Any] = {"native_delay_rates": {"call_api": given}}
        conf["broker_transport_options"] = {"master_name": sentinel.master_name, **SOON_BACK}
        with fleet_on(sentinel.url, tmp_path, **conf) as fleet:
            app = fleet.app()
            workers = [fleet.worker(name=name) for name in ("one", "two")]
            ids = [app.send_task("call_api", ("ada", number)).id for number in range(60)]
            fleet.record.wait_for(rate.burst + 3)
            with app.connection_for_write() as connection:  # the replica has all waiting tasks
                client = connection.default_channel.client
                client.set("the last write", 1)
                assert client.wait(1, 30_000) == 1
            # Kill just after a start, when no message is between broker and worker: kombu removes
            # a message before it notes it as unacknowledged.
            fleet.record.wait_for(rate.burst + 12)
            workers[0].kill()
            killed = time()
            sentinel.failover()
            runs = fleet.record.wait_for_ids(ids)
    starts = [run.started for each in runs.values() for run in each]
    unheard = sum(1 for at in starts if killed - UNHEARD_SECONDS <= at <= killed)
    most = most_in_a_window(starts, LOOKED_AT * rate.period_us / 1_000_000)
    assert most <= rate.most + unheard

"""Workers on RabbitMQ with a store: the store hangs, restarts, and cuts idle connections."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from time import monotonic
from typing import Any

import pytest
from sqlalchemy import create_engine, text

from celery_native_delay import Delay, StoreUnavailable
from celery_native_delay.testing import PrivateRedis, private_redis
from tests.acceptance.worker import Fleet, fleet_on
from tests.brokers import in_ci, on_one_version
from tests.postgresql import PrivatePostgreSQL, private_postgresql
from tests.waiting import PATIENCE_SECONDS, wait_until


class Place:
    """A server in which tasks wait, and its faults."""

    def __init__(self, server: PrivateRedis | PrivatePostgreSQL, url: str) -> None:
        self.server = server
        self.url = url

    @contextmanager
    def hung(self) -> Iterator[None]:
        """Stop the server's processes (SIGSTOP), which keeps its connections open."""
        server = self.server
        processes = server.processes() if isinstance(server, PrivatePostgreSQL) else [server.pid]
        for process in processes:
            os.kill(process, signal.SIGSTOP)  # type: ignore[arg-type]
        try:
            yield
        finally:
            for process in processes:
                os.kill(process, signal.SIGCONT)  # type: ignore[arg-type]

    def cut_idle(self) -> None:
        """Close all connections, as a load balancer does with idle ones."""
        if isinstance(self.server, PrivateRedis):
            self.server.client.client_kill_filter(_type="normal", skipme=True)
            return
        engine = create_engine(self.url, isolation_level="AUTOCOMMIT")
        with engine.connect() as connection:
            connection.execute(
                text(
                    "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
                    " WHERE backend_type = 'client backend' AND pid <> pg_backend_pid()"
                )
            )
        engine.dispose()

    def restart(self) -> None:
        self.server.kill()
        self.server.start()


@pytest.fixture(params=["redis", in_ci("postgresql")])
def place(request: pytest.FixtureRequest) -> Iterator[Place]:
    if request.param == "redis":
        with private_redis() as redis:
            yield Place(redis, redis.url)
    else:
        with private_postgresql() as postgresql:
            yield Place(postgresql, postgresql.new_database())


@pytest.fixture
def fleet(vhost_url: str, place: Place, tmp_path: Path) -> Iterator[Fleet]:
    conf = {"native_delay_store": place.url, "native_delay_store_timeout_seconds": 2}
    with fleet_on(vhost_url, tmp_path, **conf) as fleet:
        yield fleet


def later(fleet: Fleet, number: int, seconds: float) -> str:
    return str(fleet.app().tasks["note"].apply_async((number,), countdown=seconds).id)


@on_one_version
def test_a_store_that_hangs_stops_no_worker(fleet: Fleet, place: Place) -> None:
    """Immediate tasks run and the worker answers; delayed tasks run afterwards, once."""
    worker = fleet.worker()
    app = fleet.app()
    first = later(fleet, 0, 1)
    fleet.record.wait_for(task_id=first)
    waiting = later(fleet, 1, 2)
    with place.hung():
        began = monotonic()
        with pytest.raises(StoreUnavailable):
            later(fleet, 2, 60)
        assert monotonic() - began < PATIENCE_SECONDS
        now = [app.send_task("note", (number,)).id for number in range(10)]
        fleet.record.wait_for_ids(now)
        answers = app.control.inspect(timeout=PATIENCE_SECONDS, limit=1).ping()
        assert answers == {worker.name: {"ok": "pong"}}
        assert not fleet.record.runs(task_id=waiting)
    fleet.record.wait_for(task_id=waiting)
    again = later(fleet, 3, 1)
    fleet.record.wait_for(task_id=again)
    assert len(fleet.record.runs(task_id=waiting)) == 1


@on_one_version
@pytest.mark.parametrize("fault", [Place.cut_idle, Place.restart], ids=["cut", "restarted"])
def test_after_a_cut_or_a_restart_each_publish_waits_and_can_be_cancelled(
    fleet: Fleet, place: Place, fault: Callable[[Place], Any]
) -> None:
    """The first publish of each producer after it, too."""
    fleet.worker()
    app = fleet.app()
    delay = Delay(app)
    kept, dropped = [later(fleet, 0, 3)], [later(fleet, 1, 3)]
    fault(place)
    kept.append(wait_until(lambda: published(fleet, 2)))
    dropped.append(later(fleet, 3, 3))
    for task_id in dropped:
        assert delay.cancel(task_id)
    fleet.record.wait_for_ids(kept)
    marker = later(fleet, 4, 2)
    fleet.record.wait_for(task_id=marker)
    assert {run.id for run in fleet.record.runs()} == {*kept, marker}


def published(fleet: Fleet, number: int) -> str | None:
    try:
        return later(fleet, number, 3)
    except StoreUnavailable:  # a server that starts
        return None


@on_one_version
def test_a_task_that_ran_is_not_overdue_after_an_outage(fleet: Fleet, place: Place) -> None:
    """So run-now has nothing to run a second time."""
    fleet.worker()
    ids = [later(fleet, number, 1 + number / 10) for number in range(10)]
    fleet.record.wait_for(1)
    place.restart()
    fleet.record.wait_for_ids(ids)
    delay = Delay(fleet.app())
    wait_until(lambda: delay.count() == 0)
    assert not any(delay.run_now(task_id) for task_id in ids)

"""Holding, dropping and releasing tasks while real workers run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import pytest

from celery_native_delay import CannotDelay, Delay, InvalidQuery, StoreUnavailable
from celery_native_delay.app.doctor import examine
from celery_native_delay.app.holds import HoldCalls
from celery_native_delay.records.holds import Hold
from celery_native_delay.testing import PrivateRabbitMQ, PrivateRedis, private_redis
from tests.acceptance.worker import Fleet
from tests.brokers import SYSTEM_RABBITMQ, in_ci
from tests.postgresql import PrivatePostgreSQL, private_postgresql
from tests.waiting import wait_until


@dataclass
class Held:
    """A fleet, and the server in which its held tasks wait."""

    fleet: Fleet
    server: PrivateRedis | PrivatePostgreSQL

    @property
    def delay(self) -> Delay:
        return Delay(self.fleet.app())

    def holds(self) -> list[Hold] | None:
        """All holds; None if the server is about to start."""
        with suppress(StoreUnavailable, OSError):
            return self.delay.holds()

    def taken_up(self, task: str, *args: Any) -> None:
        """Send tasks until the workers hold one: they have read the hold."""
        wait_until(lambda: self.waits(self.send(task, *args)))

    def send(self, task: str, *args: Any, **options: Any) -> str:
        return str(self.fleet.app().send_task(task, args, **options).id)

    def waits(self, task_id: str) -> bool:
        """Return True if a task is held, False if it ran."""

        def known() -> str | None:
            if any(task.held for task in self.delay.show(task_id)):
                return "held"
            return "ran" if self.fleet.record.runs(task_id=task_id) else None

        return wait_until(known) == "held"


@pytest.fixture(params=["redis", "rabbitmq-redis"])
def held(
    request: pytest.FixtureRequest,
    running_rabbitmq: Callable[..., PrivateRabbitMQ],
    new_fleet: Callable[..., Fleet],
) -> Iterator[Held]:
    broker, _, store = request.param.partition("-")
    private: Any = private_postgresql if store == "postgresql" else private_redis
    with private() as server:
        url = server.new_database() if store == "postgresql" else server.url
        if broker == "redis":
            yield Held(new_fleet(url), server)
        else:
            vhost = running_rabbitmq(SYSTEM_RABBITMQ).new_vhost()
            yield Held(new_fleet(vhost, native_delay_store=url), server)


IN_STORE = pytest.mark.parametrize("held", ["rabbitmq-redis"], indirect=True)


@pytest.mark.parametrize("held", ["redis", in_ci("rabbitmq-postgresql")], indirect=True)
def test_what_is_held_stays_held_until_its_release_and_others_run(held: Held) -> None:
    """Workers are killed, the store restarts, a deployment comes in between."""
    record = held.fleet.record
    worker = held.fleet.worker()
    hold = held.delay.hold("not*", by="ada@web1")
    held.taken_up("note")
    sent = [held.send("note", number) for number in range(20)]
    sent += [held.send("note", 20 + number, countdown=1 + number / 10) for number in range(5)]
    other = held.send("careful")
    record.wait_for(task_id=other)
    for task_id in sent:
        assert held.waits(task_id)
    worker.kill()
    held.server.kill()
    held.server.start()
    worker = held.fleet.worker()
    (seen,) = wait_until(held.holds)
    assert (seen.name, seen.mode, seen.by) == ("not*", "hold", "ada@web1")
    assert seen.held >= len(sent)
    sent.append(held.send("note", 25))
    assert held.waits(sent[-1])
    (task,) = held.delay.show(sent[-1])
    assert task.held is not None
    assert task.held.by == "ada@web1"
    assert held.delay.next_due() is None, "held tasks have no due time"
    assert held.delay.histogram() == []
    assert held.delay.update(sent[0], args=["changed"], expires=3600)
    with pytest.raises(CannotDelay, match="expected expires after now"):
        held.delay.update(sent[0], expires=-1)
    assert held.waits(sent[0])
    assert not {run.id for run in record.runs()} & set(sent)

    told: list[tuple[int, int]] = []
    number = held.delay.release(hold.task, rate="20/s", progress=lambda *now: told.append(now))
    assert number >= len(sent)
    assert sum(done for done, _ in told) == number
    runs = record.wait_for_ids(sent)
    assert all(len(runs[task_id]) == 1 for task_id in sent)
    assert runs[sent[0]][0].args == ["changed"]
    due = [datetime.fromisoformat(str(runs[task_id][0].eta)) for task_id in sent]
    # A busy machine starts late tasks together.
    assert (due[-1] - due[0]).total_seconds() >= (len(sent) - 1) / 20 - 0.01, "no stampede"
    assert held.delay.holds() == []
    again = held.send("note", 99)
    record.wait_for(task_id=again)
    with pytest.raises(InvalidQuery, match=r"got 'not\*'"):
        held.delay.release("not*")
    worker.stop()


@IN_STORE
def test_a_release_that_dies_is_finished_later(held: Held, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if the hold itself is gone, and tasks are left."""
    monkeypatch.setattr(HoldCalls._page, "__defaults__", (5,))  # tasks at once
    held.fleet.worker()
    held.delay.hold("note")
    held.taken_up("note")
    sent = [held.send("note", number) for number in range(12)]
    for task_id in sent:
        assert held.waits(task_id)

    def dies(*_: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        held.delay.release("note", progress=dies)
    assert [(hold.mode, hold.held > 0) for hold in held.delay.holds()] == [("release", True)]
    held.delay._write(lambda holds, now_us: ([], None))
    assert [(hold.mode, hold.held > 0) for hold in held.delay.holds()] == [("ended", True)]
    assert any(each.check == "holds" for each in examine(held.fleet.app()))
    held.delay.release("note")
    runs = held.fleet.record.wait_for_ids(sent)
    assert all(len(runs[task_id]) == 1 for task_id in sent)
    assert held.delay.holds() == []


def test_dropped_tasks_are_revoked_and_held_ones_too(held: Held) -> None:
    if "amqp" in held.fleet.broker_url:
        held.fleet.conf["result_backend"] = "rpc://"
    worker = held.fleet.worker(more=("-E",))
    held.delay.hold("note")
    held.taken_up("note")
    first = held.send("note", "held first")
    assert held.waits(first)
    assert held.delay.drop("note").mode == "drop"
    worker.wait_for_log("Discarding revoked task", first)
    second = held.send("note", "dropped")
    worker.wait_for_log("Discarding revoked task", second)
    assert [hold.mode for hold in held.delay.holds()] == ["drop"]
    held.delay.release("note")
    third = held.send("note", "runs")
    held.fleet.record.wait_for(task_id=third)
    assert not held.fleet.record.runs(task_id=first) + held.fleet.record.runs(task_id=second)


@IN_STORE
def test_a_hold_with_an_end_ends_by_itself(held: Held) -> None:
    held.fleet.worker()
    held.delay.hold("note", search="args:acme", seconds=12)
    free = held.send("note", "gold")
    held.fleet.record.wait_for(task_id=free)
    held.taken_up("note", "acme")
    (hold,) = held.delay.holds()
    assert hold.held >= 1
    assert hold.until_us is not None
    last = held.send("note", "acme")
    (run,) = held.fleet.record.wait_for(task_id=last)
    assert run.started >= hold.until_us / 1e6 - 1.5
    assert held.delay.holds() == []

"""The worker's gate for messages of fenced runs, without a server for records."""

from __future__ import annotations

import logging
from time import time
from types import SimpleNamespace

import pytest

from celery_native_delay import DelaySettings, RecordsUnavailable
from celery_native_delay.fence.run import ABORTED, COMMITTED, HEADER, OPEN, Record
from celery_native_delay.records.opened import RecordsLocation
from celery_native_delay.worker import fencing
from celery_native_delay.worker.arrival import Arrival, AskAgain, Drop, WaitUntil
from celery_native_delay.worker.fencing import EVENT, Fence

NOW = time()


def arrival(header: object) -> Arrival:
    message = SimpleNamespace(headers={"id": "1", HEADER: header}, consumed_from="jobs")
    return Arrival(message, message.headers, None, round(NOW * 1e6))


class Runs:
    """The record of one run: None if it is lost, an error if unreachable; a worker may seal it."""

    record: Record | Exception | None = None
    asked = 0

    def __init__(self, records: object) -> None: ...

    def load(self, runs: list[str]) -> list[Record | None]:
        Runs.asked += 1
        if isinstance(self.record, Exception):
            raise self.record
        return [self.record]

    def seal(self, run: str, record: Record, *, kept_seconds: float) -> Record:
        Runs.record = record
        return record


@pytest.fixture
def fence(monkeypatch: pytest.MonkeyPatch) -> Fence:
    monkeypatch.setattr(fencing, "Runs", Runs)
    monkeypatch.setattr(Runs, "record", None)
    monkeypatch.setattr(Runs, "asked", 0)
    return Fence(
        DelaySettings(), "worker-1", RecordsLocation("redis://127.0.0.1:1", "celery_delay")
    )


def test_a_worker_without_records_runs_fenced_tasks_and_warns_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    unfenced = Fence(DelaySettings(), "worker-1", None)
    tasks = [arrival("run/0/0-a"), arrival("run/0/1-b")]
    assert list(map(unfenced, tasks)) == [None, None]
    assert [each.message.headers for each in tasks] == [{"id": "1"}] * 2  # nor will a retry have it
    (record,) = caplog.records
    assert "has no native_delay_records" in record.getMessage()


def test_a_task_with_a_malformed_header_runs_and_the_header_is_logged(
    fence: Fence, caplog: pytest.LogCaptureFixture
) -> None:
    """The header may be of a later release. Rather twice than never."""
    with caplog.at_level(logging.WARNING):
        assert fence(arrival("2;run=x")) is None
        assert fence(arrival("2;run=y")) is None
    (record,) = caplog.records
    assert "expected run/partition/attempt, got '2;run=x'" in record.getMessage()


def test_a_task_without_the_header_passes(fence: Fence) -> None:
    message = SimpleNamespace(headers={"id": "1"})
    assert fence(Arrival(message, message.headers, None, 0)) is None


def test_a_task_of_the_winning_attempt_runs(fence: Fence) -> None:
    Runs.record = Record(COMMITTED, NOW, winners={"0": "a"})
    won = arrival("run/0/a")
    assert fence(won) is None
    assert HEADER not in won.message.headers
    assert fence(arrival("run/0/a")) is None
    assert Runs.asked == 1, "it is remembered"


def test_tasks_of_a_reopened_run_are_not_dropped(fence: Fence) -> None:
    """The messages of its new driver may come soon after messages of the aborted attempt."""
    Runs.record = Record(ABORTED, NOW, by="driver")
    assert isinstance(fence(arrival("run/0/a")), Drop)
    Runs.record = Record(OPEN, NOW, deadline=NOW + 86_400)
    assert isinstance(fence(arrival("run/0/a")), WaitUntil)


def test_a_run_without_a_record_is_sealed_by_policy(fence: Fence) -> None:
    assert fence(arrival("run/0/a")) is None
    assert isinstance(Runs.record, Record)
    assert (Runs.record.state, Runs.record.by) == ("all", "worker-1")


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        (Record(COMMITTED, NOW, winners={"0": "b"}), "lost"),
        (Record(ABORTED, NOW, by="driver"), "aborted"),
    ],
)
def test_a_task_of_a_losing_attempt_is_dropped(fence: Fence, record: Record, reason: str) -> None:
    Runs.record = record
    ruling = fence(arrival("run/0/a"))
    assert isinstance(ruling, Drop)
    assert (ruling.event, ruling.fields) == (EVENT, {"fence": "run/0/a", "reason": reason})


@pytest.mark.parametrize(
    "record", [RecordsUnavailable("away"), Record(OPEN, NOW, deadline=NOW + 86_400)]
)
def test_a_task_of_an_open_or_unreachable_run_waits_in_the_broker(
    fence: Fence, record: Record | Exception
) -> None:
    """The worker reads the record once a second, not for each message."""
    Runs.record = record
    assert isinstance(fence(arrival("run/0/b")), WaitUntil)
    ruling = fence(arrival("run/0/a"))
    assert Runs.asked == 1
    assert isinstance(ruling, WaitUntil)
    assert ruling.due_us > NOW * 1e6
    assert isinstance(ruling.otherwise, AskAgain)


def test_a_broadcast_of_an_open_run_runs_at_once(fence: Fence) -> None:
    """A broadcast has no queue that it could be put back into."""
    Runs.record = Record(OPEN, NOW, deadline=NOW + 86_400)
    broadcast = arrival("run/0/a")
    broadcast.message.consumed_from = ""
    assert fence(broadcast) is None

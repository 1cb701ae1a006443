"""Fenced runs: the header of a task, and the rules by which its run's record decides if it runs."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from celery_native_delay.fence.run import (
    ABORTED,
    ALL,
    COMMITTED,
    LONGEST_HOLD_SECONDS,
    OPEN,
    SHORTEST_HOLD_SECONDS,
    Fate,
    Record,
    Stamp,
    fate,
    given_up,
    hold_seconds,
    is_overdue,
    opened,
    sealed,
)

NOW = 1_795_200_000.5


@pytest.mark.parametrize("run", ["reminders-2026-11-20:5f3a", "a/b/c", "é 1/2", "0"])
def test_a_header_is_read_as_it_was_written(run: str) -> None:
    """The name of a run may hold any character."""
    stamp = Stamp(run, 12, "1-9f86d081")
    assert str(stamp) == f"{run}/12/1-9f86d081"
    assert Stamp.parse(str(stamp)) == stamp


@pytest.mark.parametrize(
    "text", ["", "run", "run/1", "run/x/1", "run/-1/1", "/1/1", "run/1/", 7, None]
)
def test_a_malformed_header_raises(text: object) -> None:
    with pytest.raises(ValueError, match=r"expected run/partition/attempt, got"):
        Stamp.parse(text)


def test_a_record_is_read_as_it_was_written_also_by_an_older_release() -> None:
    record = Record(COMMITTED, NOW, winners={"0": "0-a", "7": "2-b"}, by="the driver", jobs=("j",))
    assert Record.from_json(record.to_json()) == record
    assert json.loads(record.to_json())["v"] == 1
    assert Record.from_json(json.dumps(json.loads(record.to_json()) | {"new": 1})) == record


@pytest.mark.parametrize(
    ("record", "attempt", "expected"),
    [
        (Record(OPEN, NOW, deadline=NOW + 1), "0-a", Fate.HOLD),
        (Record(COMMITTED, NOW, winners={"3": "0-a"}), "0-a", Fate.RUN),
        (Record(COMMITTED, NOW, winners={"3": "0-a"}), "1-b", Fate.DROP),
        (Record(COMMITTED, NOW, winners={"4": "0-a"}), "0-a", Fate.DROP),
        (Record(COMMITTED, NOW), "0-a", Fate.DROP),
        (Record(ABORTED, NOW), "0-a", Fate.DROP),
        (Record(ALL, NOW), "0-a", Fate.RUN),
        (Record("of a later release", NOW), "0-a", Fate.RUN),
    ],
)
def test_the_record_of_a_run_decides_which_attempt_runs(
    record: Record, attempt: str, expected: Fate
) -> None:
    assert fate(record, Stamp("run", 3, attempt)) is expected


@pytest.mark.parametrize(
    ("record", "overdue"),
    [
        (None, True),
        (Record(OPEN, NOW, deadline=NOW + 0.1), False),
        (Record(OPEN, NOW, deadline=NOW), True),
        (Record(COMMITTED, NOW), False),
        (Record(ABORTED, NOW), False),
        (Record(ALL, NOW), False),
    ],
)
def test_an_open_run_is_overdue_at_its_deadline(record: Record | None, overdue: bool) -> None:
    assert is_overdue(record, now=NOW) is overdue


def test_the_policy_decides_for_a_run_whose_driver_died() -> None:
    """ "run" means rather twice than never, "drop" rather never than twice."""
    stamp = Stamp("run", 0, "0-a")
    assert fate(given_up("run", now=NOW, by="w"), stamp) is Fate.RUN
    assert fate(given_up("drop", now=NOW, by="w"), stamp) is Fate.DROP


def test_only_final_states_may_be_cached() -> None:
    """A job that sends a run again opens an aborted run anew."""
    final = [state for state in (OPEN, COMMITTED, ABORTED, ALL) if Record(state, NOW).is_final]
    assert final == [COMMITTED, ALL]


@pytest.mark.parametrize(
    ("open_for", "left", "expected"),
    [
        (0, 3600, SHORTEST_HOLD_SECONDS),
        (100, 3600, 10),
        (2000, 3600, LONGEST_HOLD_SECONDS),
        (2000, 7, 7),
        (2000, 0.01, SHORTEST_HOLD_SECONDS),
        (-60, 3600, SHORTEST_HOLD_SECONDS),  # the driver's clock is ahead
    ],
)
def test_the_younger_a_run_the_sooner_its_messages_are_checked_again(
    open_for: float, left: float, expected: float
) -> None:
    record = Record(OPEN, NOW - open_for, deadline=NOW + left)
    assert hold_seconds(record, now=NOW) == pytest.approx(expected)
    assert SHORTEST_HOLD_SECONDS <= hold_seconds(None, now=NOW) <= LONGEST_HOLD_SECONDS


BEGUN = Record(OPEN, NOW, deadline=NOW + 60)
SEALED = [Record(state, NOW, jobs=("j",)) for state in (COMMITTED, ABORTED, ALL)]


def test_opening_a_run_again_extends_its_deadline() -> None:
    """Executors, whose clocks differ, open the run again. The time at which it began stays."""
    held = opened(None, BEGUN, "j")
    assert held == replace(BEGUN, jobs=("j",))
    later = Record(OPEN, NOW + 5, deadline=NOW + 65)
    for new in (later, BEGUN):
        held = opened(held, new, "j")
        assert held == replace(BEGUN, deadline=NOW + 65, jobs=("j",))


@pytest.mark.parametrize("held", SEALED, ids=lambda held: held.state)
def test_a_sealed_run_stays_as_it_is(held: Record) -> None:
    assert opened(held, BEGUN, "j") is held
    assert [sealed(held, new) is held for new in SEALED] == [True] * 3


def test_an_aborted_run_is_opened_again_by_another_job() -> None:
    """Workers may have dropped the tasks of the jobs that had opened it."""
    held = opened(opened(None, BEGUN, "j"), BEGUN, "k")
    aborted = sealed(held, Record(ABORTED, NOW, by="worker"))
    assert aborted.jobs == ("j", "k")
    for job in ("j", "k"):
        assert opened(aborted, BEGUN, job) is aborted
    assert opened(aborted, BEGUN, "l") == replace(BEGUN, jobs=("l",))
    lost = sealed(None, Record(ABORTED, NOW, by="worker"))
    assert opened(lost, BEGUN, "j") == replace(BEGUN, jobs=("j",))

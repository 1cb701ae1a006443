"""The parts of ``make chaos`` that need no broker: verdicts, load, report and schedule."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from celery_native_delay.schedules.state import MOST_MISSED
from tests.chaos.entries import Occurrence, judge_entries
from tests.chaos.entries import Verdict as EntryVerdict
from tests.chaos.load import ROUTES, Step, steps
from tests.chaos.oracle import (
    FORBIDDEN,
    Judgement,
    Sent,
    Start,
    Struck,
    Verdict,
    judge,
    must_run,
    read_notes,
)
from tests.chaos.schedule import SETTLE_SECONDS, SHORTEST_GAP_SECONDS, FaultKind, schedule

pytestmark = pytest.mark.tools

PATIENCE_SECONDS = 60.0

SENT = Sent("a", "default", sent_at=100, due_at=110, confirmed_at=100.1)
RAN = Start("a", "default", "default-1", at=110.02)


def verdicts(judgement: Judgement) -> list[Verdict]:
    return [finding.verdict for finding in judgement.findings]


def judged(task: Sent, *runs: Start, struck: tuple[Struck, ...] = ()) -> Judgement:
    return judge([task], runs, struck, patience_seconds=PATIENCE_SECONDS)


# ---- each verdict can fail a run ---------------------------------------------------------------


def test_a_task_that_ran_once_and_on_time_has_no_verdict() -> None:
    found = judged(SENT, RAN)
    assert found.findings == ()
    assert (found.sent, found.confirmed, found.unknown, found.ran) == (1, 1, 0, 1)
    assert found.lateness == ((110, pytest.approx(0.02)),)


OUTAGE = Struck("node-killed", "node 1", began_at=105, ended_at=200)
UNANSWERED = replace(SENT, confirmed_at=None)
CANCELLED = replace(SENT, cancelling_at=104, cancelled_at=105)
TOO_LATE = replace(SENT, cancelling_at=110.01, cancelled_at=110.03)
RAN_BEFORE = replace(SENT, cancelling_at=111, cancelled_at=111.1)
REFUSED = replace(SENT, cancelling_at=109.9, cancel_refused="too late")


@pytest.mark.parametrize(
    ("case", "task", "runs", "struck", "expected"),
    [
        ("it never ran", SENT, [], [], [Verdict.LOST]),
        ("it waited for the end of an outage", SENT, [259], [OUTAGE], []),
        ("too late even for that", SENT, [261], [OUTAGE], [Verdict.LOST]),
        ("too late without a fault", SENT, [259], [], [Verdict.LOST]),
        ("its producer got no answer", UNANSWERED, [], [], []),
        ("unanswered and early", UNANSWERED, [109.9], [], [Verdict.EARLY]),
        ("early", SENT, [109.9], [], [Verdict.EARLY]),
        ("due times have milliseconds", SENT, [109.9995], [], []),
        ("cancelled", CANCELLED, [], [], []),
        ("cancelled but ran", CANCELLED, [111], [], [Verdict.CANCELLED_BUT_RAN]),
        ("started while it was cancelled", TOO_LATE, [110.02], [], [Verdict.CANCELLED_BUT_RAN]),
        ("a copy of it came first", RAN_BEFORE, [110.02], [], []),
        ("its cancel got no answer", replace(SENT, cancelling_at=104), [], [], []),
        ("its cancel was refused", REFUSED, [], [], [Verdict.LOST]),
    ],
)
def test_the_verdict_on_a_task(
    case: str, task: Sent, runs: list[float], struck: list[Struck], expected: list[Verdict]
) -> None:
    found = judged(task, *(replace(RAN, at=at) for at in runs), struck=tuple(struck))
    assert verdicts(found) == expected
    assert found.forbidden == list(found.findings)


def test_the_eta_of_the_message_counts_if_it_is_later() -> None:
    """The producer notes a due time before it sends the task."""
    assert verdicts(judged(SENT, replace(RAN, eta_at=110.5))) == [Verdict.EARLY]
    late = judged(SENT, replace(RAN, eta_at=110.005))
    assert late.lateness == ((110.005, pytest.approx(0.015)),)


def test_a_task_that_another_queues_worker_ran_is_misrouted() -> None:
    assert verdicts(judged(SENT, replace(RAN, queue="side"))) == [Verdict.MISROUTED]
    twice = judged(SENT, RAN, replace(RAN, queue="side", at=111))
    assert verdicts(twice) == [Verdict.MISROUTED, Verdict.DOUBLED]


def test_a_task_that_ran_twice_is_counted_and_not_forbidden() -> None:
    found = judged(SENT, RAN, replace(RAN, at=112))
    assert verdicts(found) == [Verdict.DOUBLED]
    assert found.forbidden == []
    assert found.reasons == {"unexplained": 1}
    assert set(FORBIDDEN) == set(Verdict) - {Verdict.DOUBLED}


@pytest.mark.parametrize(
    ("killed_at", "is_forbidden"), [(None, True), (110.03, False), (109.9, True), (120, True)]
)
def test_a_task_that_is_once_may_run_again_only_if_its_first_run_was_cut_short(
    killed_at: float | None, is_forbidden: bool
) -> None:
    once = replace(SENT, once=True)
    kills = [] if killed_at is None else [Struck("worker-killed", "default-1", killed_at, 121)]
    again = replace(RAN, at=125, worker="default-2")
    found = judged(once, RAN, again, struck=tuple(kills))
    assert (Verdict.ONCE_BUT_DOUBLED in verdicts(found)) == is_forbidden
    assert bool(found.forbidden) == is_forbidden


def test_a_second_run_is_explained_by_the_fault_that_caused_it() -> None:
    again = replace(RAN, at=115, worker="default-2")
    for fault, reason in (
        (Struck("worker-killed", "default-1", 110.03, 112), "its worker was killed"),
        (Struck("node-killed", "node 0", 100.05, 101), "its producer got no answer"),
        (Struck("node-paused", "node 0", 110.03, 111), "did not get its acknowledgement"),
        (Struck("node-killed", "node 0", 105, 106), "handed it over twice"),
        (Struck("node-killed", "node 0", 120, 121), "unexplained"),
    ):
        (said,) = judged(SENT, RAN, again, struck=(fault,)).reasons
        assert reason in said


# ---- notes of producers ------------------------------------------------------------------------


def note(what: str, at: float, **more: Any) -> dict[str, Any]:
    return {"what": what, "id": "a", "at": at} | more


def test_the_notes_of_a_producer_tell_which_tasks_must_run() -> None:
    sending, confirmed = note("sending", 100, queue="default", due=110), note("confirmed", 100.1)
    cancelling = note("cancelling", 105)
    for later, must in (
        ([], False),
        ([note("failed", 101, error="gone")], False),
        ([confirmed], True),
        ([confirmed, cancelling], False),
        ([confirmed, cancelling, note("cancelled", 106)], False),
        ([confirmed, cancelling, note("not cancelled", 106, said="too late")], True),
    ):
        (task,) = read_notes([sending, *later])
        assert must_run(task) == must, later


# ---- steps of producers ------------------------------------------------------------------------


def test_a_seed_determines_what_a_producer_sends() -> None:
    def first(seed: int) -> list[Step]:
        return list(islice(steps(seed, rate=20, longest_seconds=30), 3000))

    assert first(1) == first(1) != first(2)
    wishes = [wish for step in first(1) for wish in step.wishes]
    assert len({wish.id for wish in wishes}) == len(wishes)
    assert {step.queue for step in first(1)} == set(ROUTES)
    assert all(0 < wish.countdown <= 30 for wish in wishes)
    assert any(wish.cancel_after is not None for wish in wishes)
    seconds = sum(step.pause_seconds for step in first(1))
    assert len(wishes) / seconds == pytest.approx(20, rel=0.1)


# ---- the schedule ------------------------------------------------------------------------------

KINDS = [
    FaultKind("node-killed", 1, 5, targets=3),
    FaultKind("worker-killed", 0, 1, targets=4),
    FaultKind("node-paused", 2, 3),
]


@given(st.integers(), st.floats(0, 20))
def test_faults_do_not_overlap_and_end_with_the_run(seed: int, minutes: float) -> None:
    faults = schedule(seed, minutes, KINDS)
    assert faults == schedule(seed, minutes, KINDS)
    free_at = SETTLE_SECONDS - SHORTEST_GAP_SECONDS
    for fault in faults:
        kind = next(kind for kind in KINDS if kind.name == fault.kind)
        assert fault.at_seconds >= free_at + SHORTEST_GAP_SECONDS - 0.11
        assert kind.shortest_seconds <= fault.lasts_seconds <= kind.longest_seconds
        assert 0 <= fault.target < kind.targets
        free_at = fault.at_seconds + fault.lasts_seconds
        assert free_at <= minutes * 60 + 0.1


# ---- schedule entries ---------------------------------------------------------------------------

KILL = Struck("worker-killed", "default-1", began_at=1010, ended_at=1011)
STRIKES = (KILL,)


def runs_of_entry(*times: tuple[float, float]) -> list[Occurrence]:
    """Runs of entry 4, which is due every 5 s from 1000: each with a due time and a start."""
    return [Occurrence(4, due, at, f"id-{due}", "default-1") for due, at in times]


def on_time(*due: float) -> list[tuple[float, float]]:
    return [(each, each + 0.1) for each in due]


def verdicts_on_entry(
    runs: list[Occurrence], struck: tuple[Struck, ...] = (), ended_at: float = 1022
) -> list[EntryVerdict]:
    found = judge_entries(runs, struck, began_at=1000, ended_at=ended_at)
    never_ran = {finding.verdict for finding in found.findings if finding.number != 4}
    assert EntryVerdict.SKIPPED in never_ran
    return [finding.verdict for finding in found.findings if finding.number == 4]


LATE = [*on_time(1005), (1010, 1021), *on_time(1020)]
EARLY = [*on_time(1005), (1010, 1009.9), *on_time(1015, 1020)]


@pytest.mark.parametrize(
    ("case", "runs", "struck", "expected"),
    [
        ("every due time ran", on_time(1005, 1010, 1015, 1020), (), []),
        ("one is missing", on_time(1005, 1010, 1020), (), ["SKIPPED"]),
        ("the run before it was late", LATE, STRIKES, ["SKIPPED"]),
        ("early", EARLY, (), ["EARLY"]),
        ("two chains", on_time(1005, 1010, 1012, 1015, 1017, 1020), (), ["TWO_CHAINS"] * 2),
        ("twice in calm", on_time(1005, 1005, 1010, 1015, 1020), (), ["DOUBLED_IN_CALM"]),
        ("twice", on_time(1005, 1010, 1010, 1015, 1020), STRIKES, ["DOUBLED"]),
    ],
)
def test_each_due_time_of_an_entry_is_judged(
    case: str, runs: list[tuple[float, float]], struck: tuple[Struck, ...], expected: list[str]
) -> None:
    found = verdicts_on_entry(runs_of_entry(*runs), struck)
    assert [verdict.name for verdict in found] == expected


def test_two_messages_of_one_due_time_are_never_excused() -> None:
    runs = runs_of_entry(*on_time(1005, 1010, 1010, 1015, 1020))
    runs[2] = replace(runs[2], id="another")
    assert verdicts_on_entry(runs, STRIKES) == [EntryVerdict.TWO_MESSAGES]


@pytest.mark.parametrize(
    ("late_runs", "expected"),
    [(MOST_MISSED, EntryVerdict.LEFT_OUT), (MOST_MISSED - 1, EntryVerdict.SKIPPED)],
)
def test_due_times_are_left_out_after_100_late_runs(late_runs: int, expected: EntryVerdict) -> None:
    now = 1000.0 + (late_runs + 3) * 5
    late = [(1000.0 + number * 5, now) for number in range(1, late_runs + 1)]
    runs = runs_of_entry(*late, (now + 5, now + 5))
    for ended_at in (now + 7, now + 2):  # after the last run, or before it
        assert verdicts_on_entry(runs, ended_at=ended_at) == [expected] * 3

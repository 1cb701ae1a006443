"""The rules of schedule entries: where they are read, what is planted, what runs or is dropped."""

from __future__ import annotations

import sys
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from celery import Celery
from celery.beat import BeatLazyFunc, Scheduler
from celery.schedules import BaseSchedule, crontab, schedule, solar
from hypothesis import given
from hypothesis import strategies as st

from celery_native_delay import CannotDelay, SettingsError, install
from celery_native_delay.app import beat
from celery_native_delay.app.schedules import Schedules
from celery_native_delay.records.interface import Change, Snapshot
from celery_native_delay.schedules.entry import ScheduleEntry, parsed
from celery_native_delay.schedules.release import InForce, Release, taken_over
from celery_native_delay.schedules.state import (
    EXPIRED,
    HEADER,
    KEPT_US,
    MOST_MISSED,
    State,
    advanced,
    left_out,
    occurrence_of,
    paused,
    planned,
    refused,
    resumed,
    sent_again,
    swapped,
    why_dropped,
)

S = 1_000_000
NOW_US = round(datetime(2026, 11, 23, 12, 0, tzinfo=UTC).timestamp()) * S


def entry(every: float = 10, **fields: Any) -> ScheduleEntry:
    of = schedule(timedelta(seconds=every))
    return ScheduleEntry("tick", "shop.tick", fields.pop("schedule", of), UTC, **fields)


def waiting(of: ScheduleEntry, **fields: Any) -> State:
    return replace(planted(None, of), **fields)


def planted(before: State | None, of: ScheduleEntry, now_us: int = NOW_US) -> State:
    """The state after a worker has published the entry's occurrence, anew if it has changed."""
    after = planned(before, of, now_us)
    assert after is not None
    return after


def runs(
    before: State | None, after: State | None = None, task_id: str = "", **options: bool
) -> bool:
    return why_dropped(before, after, task_id, **{"redelivered": False, **options}) is None


# ---- the entry as text ---------------------------------------------------------------------------


def fields_of(low: int, high: int) -> st.SearchStrategy[Any]:
    """A field of a crontab in each form that Celery takes."""
    numbers = st.integers(low, high)
    some = st.sets(numbers, min_size=1, max_size=4)
    forms = (set, list, tuple, frozenset, lambda found: ",".join(map(str, found)))
    return st.one_of(
        st.sampled_from(["*", "*/2", f"{low}-{low + 3}"]),
        numbers | numbers.map(str),
        numbers.map(lambda first: range(first, high + 1, 3)),
        st.builds(lambda form, found: form(found), st.sampled_from(forms), some),
    )


seconds = st.floats(1e-6, 1e9).map(lambda found: timedelta(seconds=found))
schedules = st.one_of(
    st.builds(
        crontab,
        minute=fields_of(0, 59),
        hour=fields_of(0, 23),
        day_of_week=st.one_of(fields_of(0, 6), st.sampled_from(["mon-fri", "sun"])),
        day_of_month=fields_of(1, 28),
        month_of_year=fields_of(1, 12),
    ),
    st.builds(schedule, seconds.filter(bool), relative=st.booleans()),
    st.builds(
        solar, st.sampled_from(["sunset", "dawn_civil"]), st.floats(-60, 60), st.floats(-180, 180)
    ),
)


@given(schedules)
def test_another_worker_can_publish_an_entry_with_any_schedule_of_celery(of: Any) -> None:
    args = [1, datetime(2026, 1, 1, tzinfo=UTC)]
    made = entry(schedule=of, args=args, kwargs={"a": "ü"}, ends_us=NOW_US + 10**18)
    found = ScheduleEntry.from_text(made.text)
    assert found is not None
    assert found.schedule == of
    assert (found.args, found.kwargs, found.ends_us) == (args, {"a": "ü"}, made.ends_us)
    assert (found.text, found.words) == (made.text, made.words)
    assert found.next_us(NOW_US) == made.next_us(NOW_US)


def test_the_same_times_in_another_form_are_no_changed_schedule() -> None:
    forms: list[Any] = ["0,30", [0, 30], [30, 0], {0, 30}, (0, 30), range(0, 60, 30)]
    texts = {entry(schedule=crontab(minute=each)).text for each in forms}
    assert len(texts) == 1
    assert entry(schedule=crontab(minute=[0, 30])).words == "0,30 * * * * UTC"


@pytest.mark.parametrize("every", [0, -5])
def test_an_interval_that_never_ends_is_refused_by_each_process(every: float) -> None:
    made = entry(every)
    for each in (made, ScheduleEntry.from_text(made.text)):
        with pytest.raises(CannotDelay, match=f"expected an interval above 0 s, got {every} s"):
            each.next_us(NOW_US)  # type: ignore[union-attr]


class Odd(BaseSchedule):
    def remaining_estimate(self, last_run_at: datetime) -> timedelta:
        return timedelta(seconds=3)


@pytest.mark.parametrize(
    "fields", [{"schedule": Odd()}, {"args": [BeatLazyFunc(print)]}], ids=["class", "argument"]
)
def test_what_json_cannot_hold_only_a_worker_with_the_entry_can_plant(fields: Any) -> None:
    made = entry(**fields)
    assert ScheduleEntry.from_text(made.text) is None
    assert entry(**fields).text == made.text  # no address of an object
    assert made.next_us(NOW_US) == NOW_US + (3 if "schedule" in fields else 10) * S


class Once(BaseSchedule):
    """A schedule with one due time, such as django-celery-beat's ``clocked``."""

    def __init__(self, at: datetime) -> None:
        super().__init__()
        self.at = at

    def remaining_estimate(self, last_run_at: datetime) -> timedelta:
        return self.at - self.now()


def test_a_single_time_that_has_passed_runs_late_but_once() -> None:
    at = datetime(2026, 11, 23, 11, 59, tzinfo=UTC)
    once = entry(schedule=Once(at), one_off=True)
    state = waiting(once)
    assert state.due_us == NOW_US - 60 * S
    after = advanced(state, once, "task-1", NOW_US, "one")
    assert runs(state, after)
    assert after.due_us is None
    assert waiting(replace(once, ends_us=NOW_US - S)).due_us is None
    assert waiting(replace(once, one_off=False)).due_us is None


def test_a_changed_attribute_of_a_users_class_is_a_changed_schedule() -> None:
    one, other = (entry(schedule=Once(datetime(2027, 1, day, tzinfo=UTC))) for day in (1, 2))
    assert planted(waiting(one), other).due_us == other.next_us(NOW_US)


def test_an_entry_is_due_only_between_its_start_and_its_end() -> None:
    """As with django-celery-beat, an interval begins at ``start_time``."""
    found = entry(starts_us=NOW_US + 25 * S, ends_us=NOW_US + 40 * S)
    assert found.next_us(NOW_US) == NOW_US + 25 * S
    assert found.next_us(NOW_US + 25 * S) == NOW_US + 35 * S
    assert found.next_us(NOW_US + 35 * S) is None
    nightly = entry(schedule=crontab(hour=0, minute=0), starts_us=NOW_US + 12 * 3600 * S)
    assert nightly.next_us(NOW_US) == NOW_US + 12 * 3600 * S


def test_the_countdown_of_an_entry_counts_from_the_times_of_its_schedule() -> None:
    found = entry(schedule=crontab(hour=0, minute=0), options={"countdown": 900})
    midnight_us = NOW_US + 12 * 3600 * S
    assert found.next_us(NOW_US) == midnight_us + 900 * S
    assert found.next_us(midnight_us + S) == midnight_us + 900 * S
    assert found.next_us(midnight_us + 900 * S) == midnight_us + (86_400 + 900) * S


@pytest.mark.parametrize(
    ("of", "words"),
    [
        (schedule(timedelta(seconds=90)), "every 1 min 30 s"),
        (crontab(hour=2, minute=30), "30 2 * * * UTC"),
        (solar("sunset", 52.5, 13.4), "sunset at 52.5, 13.4"),
    ],
)
def test_a_schedule_is_told_in_words_which_can_be_parsed(of: Any, words: str) -> None:
    made, zone = parsed(words)
    assert entry(schedule=of).words == entry(schedule=made).words == words
    assert str(zone or "UTC") == "UTC"


def test_a_time_zone_of_pytz_is_read_by_its_name() -> None:
    """It ignores ``fold``, and begins with the local mean time of 1893."""
    pytz = pytest.importorskip("pytz")
    zone = pytz.timezone("Europe/Berlin")
    entry = ScheduleEntry("e", "t", crontab(minute=30, hour=2), zone)
    assert entry.zone == ZoneInfo("Europe/Berlin")
    assert ScheduleEntry.from_text(entry.text) is not None
    fixed = pytz.FixedOffset(60)
    assert ScheduleEntry("e", "t", crontab(), fixed).zone is fixed


def test_the_error_for_a_wrong_schedule_shows_examples() -> None:
    wrong = ("", "every 0", "every 1e15", "* * * *", "61 * * * *", "* * * * * Mars/Base", "x at 1")
    for text in wrong:
        with pytest.raises(SettingsError, match="such as 'every 10 s'"):
            parsed(text)


def test_a_solar_schedule_without_its_package_is_a_clear_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "ephem", None)
    with pytest.raises(SettingsError, match="needs: "):
        parsed("sunset at 52.5, 13.4")


# ---- the chain -----------------------------------------------------------------------------------


def test_an_entry_is_published_once_and_anew_if_it_is_changed() -> None:
    """Changed arguments leave the due time as it is.

    Else an entry for each week would never run, where every day brings a release.
    """
    state = waiting(entry())
    assert (state.number, state.due_us) == (1, NOW_US + 10 * S)
    assert planned(state, entry(), NOW_US + S) is None
    for changed, due_s in ((entry(20), 21), (entry(args=[1]), 10)):
        anew = planted(state, changed, NOW_US + S)
        assert anew.due_us == NOW_US + due_s * S
        assert not anew.waits_for(state.number)
        assert not runs(anew, None, "old")


def test_a_redelivered_occurrence_runs_again_and_publishes_nothing() -> None:
    state = advanced(waiting(entry()), entry(), "task-1", NOW_US + 10 * S, "one")
    assert not state.waits_for(1)
    assert runs(state, None, "task-1")
    later = advanced(state, entry(), "task-2", NOW_US + 20 * S, "one")
    assert runs(later, None, "task-1", redelivered=True)
    assert not runs(later, None, "task-1")
    assert not runs(None, None, "task-1", redelivered=True), "of an unknown entry"


@pytest.mark.parametrize(
    ("catch_up", "ran", "due_after_s"), [("one", True, 50), ("none", False, 50), ("all", True, 20)]
)
def test_missed_times_run_once_not_at_all_or_up_to_a_hundred(
    catch_up: Any, ran: bool, due_after_s: int
) -> None:
    before = waiting(entry())
    after = advanced(before, entry(), "late", NOW_US + 42 * S, catch_up)
    assert runs(before, after) is ran
    assert after.due_us == NOW_US + due_after_s * S
    if catch_up == "all":
        state, now_us = before, NOW_US + 5000 * S
        while state.due_us is not None and state.due_us <= now_us:
            state = advanced(state, entry(), f"task-{state.runs}", now_us, "all")
        assert state.runs == MOST_MISSED


@pytest.mark.parametrize("catch_up", ["one", "none", "all"])
def test_a_cancelled_occurrence_is_no_run_and_the_next_one_follows(catch_up: Any) -> None:
    before = waiting(entry(), id="task-1")
    for now_us in (NOW_US + 10 * S, NOW_US + 42 * S):
        after = advanced(before, entry(), "task-1", now_us, catch_up, "cancelled")
        assert runs(before, after, "task-1"), "Celery announces it as revoked"
        assert (after.runs, after.last_us, after.left_out) == (0, 0, None)
        assert after.due_us is not None
        assert after.due_us > NOW_US + 10 * S


def test_occurrences_that_did_not_run_are_counted_until_one_runs() -> None:
    state = waiting(entry())

    def next_run(discarded: Any = None, why: str | None = None) -> tuple[int, str | None, int]:
        nonlocal state
        assert state.due_us is not None
        task_id = f"task-{state.number}"
        state = advanced(state, entry(), task_id, state.due_us, "one", discarded)
        if why is not None:
            change = left_out(Snapshot(NOW_US, state.encoded()), task_id=task_id, why=why)
            state = State.from_text(change.text) or state
        return state.runs, state.left_out, state.left_outs

    assert next_run() == (1, None, 0)
    assert next_run("expired") == (1, EXPIRED, 1)
    assert next_run("cancelled") == (1, EXPIRED, 1)
    assert next_run(why="unknown task") == (1, "unknown task", 2)
    assert next_run()[:2] == (2, None)
    assert next_run("expired") == (2, EXPIRED, 1)
    before = Snapshot(NOW_US, state.encoded())
    assert left_out(before, task_id="of an earlier run", why="late").text == before.text


@pytest.mark.parametrize("catch_up", ["one", "all"])
@pytest.mark.parametrize(
    ("late_seconds", "runs"), [(0, 1), (20, 1), (21, 0), (59, 0), (60, 1), (80, 1), (81, 0)]
)
def test_a_crontab_that_missed_its_starting_deadline_does_not_run(
    catch_up: Any, late_seconds: int, runs: int
) -> None:
    """As with ``beat_cron_starting_deadline`` in beat: the newest missed time is what counts."""
    each_minute = entry(schedule=crontab())
    due_us = NOW_US - NOW_US % (60 * S)
    state = replace(waiting(each_minute), due_us=due_us)
    now_us = due_us + late_seconds * S
    after = advanced(state, each_minute, "task-1", now_us, catch_up, deadline_us=20 * S)
    assert after.runs == (runs if catch_up == "one" else late_seconds <= 20)
    assert after.due_us is not None
    assert catch_up == "all" or after.due_us > now_us
    interval = replace(waiting(entry(60)), due_us=due_us)
    assert advanced(interval, entry(60), "task-1", now_us, catch_up, deadline_us=20 * S).runs == 1


def test_a_one_off_entry_runs_once() -> None:
    once = entry(one_off=True)
    state = advanced(waiting(once), once, "task-1", NOW_US + 10 * S, "one")
    assert (state.runs, state.due_us) == (1, None)
    assert planted(replace(state, entry="{}"), once).due_us is None


def test_a_lost_occurrence_is_published_again_after_one_two_and_four_minutes() -> None:
    state, minutes = waiting(entry()), []
    for second in range(10 * 60):
        now_us = NOW_US + 10 * S + second * S
        if (found := sent_again(state, now_us)) is not None:
            assert (found.number, found.due_us) == (state.number, state.due_us)
            state = found
            minutes.append(round(second / 60))
    assert minutes == [1, 2, 4, 8]


def test_a_paused_entry_waits_until_it_is_resumed() -> None:
    off = paused(waiting(entry()))
    assert off.due_us is None
    assert not runs(off, None, "task-1")
    assert sent_again(off, NOW_US + 3600 * S) is None
    changed = planted(off, entry(20))
    assert changed.due_us is None
    assert resumed(changed, entry(20), NOW_US + 5 * S).due_us == NOW_US + 25 * S


def test_a_state_is_put_only_in_place_of_the_one_that_was_read() -> None:
    state = waiting(entry(), id="task-0")
    after = advanced(state, entry(), "task-1", NOW_US + 10 * S, "one")
    seen = Snapshot(NOW_US, state.encoded(), (("place", NOW_US),))
    assert swapped(seen, before=None, after=after) == Change(seen.text, 0, False)
    assert swapped(Snapshot(NOW_US, after.encoded()), before=state, after=after).answer
    change = swapped(seen, before=state, after=after)
    assert (change.due_us, change.replaces, change.answer) == (after.due_us, True, True)
    assert State.from_text(change.text) == after
    others = left_out(seen, task_id="task-0", why="late"), refused(seen, problem="no task")
    assert [each.kept_us for each in (change, *others)] == [NOW_US + KEPT_US] * 3


def test_a_header_that_cannot_be_read_marks_no_occurrence() -> None:
    for header in (
        3,
        {"v": 9, "app": "shop", "entry": "a", "number": 1},
        {"v": 1, "app": "shop", "entry": 1, "number": 1},
        {"v": 1, "app": None, "entry": "a", "number": 1},
    ):
        assert occurrence_of({HEADER: header}) is None


# ---- the newest configuration --------------------------------------------------------------------


def release(version: Any = None, **entries: ScheduleEntry) -> Release:
    return Release.of(version, entries)


def take_over(stored: str | None, ours: Release, *, is_new: bool = True) -> tuple[str, InForce]:
    change = taken_over(Snapshot(NOW_US, stored), ours=ours, is_new=is_new)
    assert change.text is not None
    assert set(Release.from_text(change.text).names) == set(change.answer.names)
    return change.text, change.answer


def test_the_worker_that_booted_last_wins_among_equal_versions() -> None:
    stored, found = take_over(None, release(a=entry(), b=entry()))
    assert found == InForce(("a", "b"), True)
    stored, found = take_over(stored, release(a=entry(20)))
    assert found == InForce(("a",), True, ("b",))
    _, found = take_over(stored, release(a=entry(), b=entry()), is_new=False)
    assert found == InForce(("a",), False, is_tie=True)
    _, found = take_over(stored, release(a=entry(20)), is_new=False)
    assert found == InForce(("a",), True)


@pytest.mark.parametrize(("older", "newer"), [(9, 10), ("2026-09-30", "2026-11-01"), (None, 1)])
def test_a_worker_of_an_older_version_publishes_nothing(older: Any, newer: Any) -> None:
    stored, _ = take_over(None, release(newer, a=entry()))
    assert not take_over(stored, release(older, b=entry()))[1].is_ours
    assert not take_over(stored, release(older, a=entry()))[1].is_ours
    assert take_over(stored, release(newer, b=entry()))[1].is_ours


# ---- the setting beat_scheduler ------------------------------------------------------------------


class OwnScheduler(Scheduler):
    """Takes what Celery's beat passes by keyword, as sqlalchemy-celery-beat and redisbeat do."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        assert not args
        assert {"app", "schedule_filename", "max_interval", "lazy"} == {*kwargs}
        super().__init__(**kwargs)

    def setup_schedule(self) -> None:
        self.add(name="own", task="shop.own", schedule=60.0)


class RedBeatScheduler(Scheduler):
    __module__ = "redbeat.schedulers"


class OwnRedBeat(RedBeatScheduler):
    __module__ = "shop.beat"


def app_with(beat_scheduler: Any) -> Celery:
    app = Celery("shop", broker="redis://", set_as_current=False)
    app.conf.beat_scheduler = beat_scheduler
    return install(app, schedules=True)


def test_a_scheduler_is_made_and_found_as_by_celerys_beat(monkeypatch: pytest.MonkeyPatch) -> None:
    points = (("shop", f"{__name__}:OwnScheduler"),)
    monkeypatch.setattr(beat, "load_extension_class_names", lambda _: points)
    for name in (OwnScheduler, "shop"):
        assert [*Schedules(app_with(name))._read_entries()] == ["own"]


@pytest.mark.parametrize("kind", [RedBeatScheduler, OwnRedBeat])
def test_redbeat_is_refused_by_name_with_the_way_out(kind: Any) -> None:
    """Its ``schedule`` has only the entries that are due now, so entries would come and go."""
    with pytest.raises(SettingsError, match=r"got .*RedBeat.*Move these entries to beat_schedule"):
        Schedules(app_with(kind))._read_entries()


def test_an_unknown_scheduler_is_an_error_of_the_setting() -> None:
    with pytest.raises(SettingsError, match=r"expected beat_scheduler to name .*got 'djnago'"):
        Schedules(app_with("djnago"))._read_entries()

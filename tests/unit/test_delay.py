"""``Delay(app)`` and the other public functions with wrong arguments."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from datetime import date, datetime
from pathlib import Path
from typing import Any

import pytest
from celery import Celery
from celery.result import AsyncResult, GroupResult

from celery_native_delay import (
    Delay,
    DelayTooLong,
    InvalidDueTime,
    InvalidQuery,
    SettingsError,
    StoreUnavailable,
    Verdict,
    delay_headers,
    install,
)
from celery_native_delay.bulk import bulk
from celery_native_delay.metrics import expose
from celery_native_delay.transports.aliases import settings_from_option


@pytest.fixture
def app(tmp_path: Path) -> Iterator[Celery]:
    """An app whose delayed tasks wait in an SQLite file."""
    app = Celery("shop", broker="memory://", backend="cache+memory://", set_as_current=False)
    install(app, store=f"sqlite:///{tmp_path}/delays.db")
    yield app
    app.close()


@pytest.fixture
def sent(app: Celery) -> list[AsyncResult]:
    """Three waiting tasks."""
    return [app.send_task("remind", (number,), countdown=600 + number) for number in range(3)]


@pytest.fixture
def delay(app: Celery, sent: list[AsyncResult]) -> Delay:
    return Delay(app)


# ---- unknown outcomes ---------------------------------------------------------------------


def test_a_cancel_whose_answer_was_lost_raises_that_its_outcome_is_unknown(
    app: Celery, delay: Delay, sent: list[AsyncResult], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the second attempt the task is no longer in the records: the first has cancelled it."""
    lost = iter(app.connection().recoverable_connection_errors[:1])
    cancel = Delay._cancel

    def lose_the_first_answer(*arguments: Any) -> Any:
        outcome = cancel(*arguments)
        for error in lost:
            raise error("connection lost")
        return outcome

    monkeypatch.setattr(Delay, "_cancel", lose_the_first_answer)
    with pytest.raises(StoreUnavailable, match="it was changed, or it has run"):
        delay.cancel(sent[0])
    assert delay.cancel(sent[1])
    assert [task.id for task in delay.ls()] == [sent[2].id]


@pytest.mark.parametrize("change", ["cancel_all", "run_all_now"])
def test_many_tasks_are_changed_some_at_a_time_with_an_outcome_for_each(
    delay: Delay, sent: list[AsyncResult], monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    monkeypatch.setattr("celery_native_delay.app.delay.AT_ONCE", 2)
    given = [sent[2], "nobody", sent[0], sent[1], sent[0]]
    outcomes = getattr(delay, change)(given)
    assert [each.id for each in outcomes] == [str(getattr(task, "id", task)) for task in given]
    unlisted = Verdict.UNKNOWN if change == "cancel_all" else Verdict.DONE
    expected = [Verdict.DONE, Verdict.UNKNOWN, Verdict.DONE, Verdict.DONE, unlisted]
    assert [each.verdict for each in outcomes] == expected


def test_a_page_is_a_sequence_of_waiting_tasks(delay: Delay, sent: list[AsyncResult]) -> None:
    page = delay.ls(limit=2)
    assert isinstance(page, Sequence)
    assert (len(page), page.total, bool(delay.ls("nothing like it"))) == (2, 3, False)
    assert page.tasks == tuple(page) == (page[0], *page[1:])
    assert [task.id for task in reversed(page)] == [sent[1].id, sent[0].id]
    assert [task.id for task in page] == [result.id for result in sent[:2]]
    assert page[-1] in page


# ---- which task ---------------------------------------------------------------------------

#: Each change, and the method that makes it for many tasks.
CHANGES = [("cancel", "cancel_all"), ("run_now", "run_all_now"), ("reschedule", "reschedule_all")]

each_change = pytest.mark.parametrize(("one", "many"), CHANGES)


def change(delay: Delay, name: str, what: Any) -> Any:
    moment = {"countdown": 900} if name.startswith("reschedule") else {}
    return getattr(delay, name)(what, **moment)


@each_change
def test_a_task_is_given_by_its_id_its_result_or_a_waiting_task(
    delay: Delay, sent: list[AsyncResult], one: str, many: str
) -> None:
    (found,) = delay.show(sent[2])
    for task, result in zip((sent[0].id, sent[1], found), sent, strict=True):
        assert change(delay, one, task)
        assert delay.show(result.id) == delay.show(result)


@each_change
def test_many_tasks_are_given_by_a_group_result(
    delay: Delay, sent: list[AsyncResult], one: str, many: str
) -> None:
    assert all(change(delay, many, GroupResult("reminders", sent)))


@each_change
def test_no_task_is_changed_if_an_argument_is_no_task(
    delay: Delay, sent: list[AsyncResult], one: str, many: str
) -> None:
    """A text is not taken for a list of one-letter ids."""
    before = delay.ls()
    no_task = "expected the id of a task, or its AsyncResult, got "
    for several in ([sent[0].id], tuple(sent), GroupResult("g", sent), before):
        with pytest.raises(TypeError, match="expected the id of a task"):
            change(delay, one, several)
    for wrong in (None, 7, "", b"id", object):
        with pytest.raises(TypeError, match=no_task):
            change(delay, one, wrong)
        with pytest.raises(TypeError, match=no_task):
            delay.show(wrong)  # type: ignore[arg-type]
    for tasks in ([sent[0].id, None], [sent[0].id, ["b"]], [""]):
        with pytest.raises(TypeError, match=no_task):
            change(delay, many, tasks)
    for tasks in (sent[0].id, sent[0], None, 7):
        with pytest.raises(TypeError, match="expected the ids of tasks, such as a list of them, "):
            change(delay, many, tasks)
    assert delay.ls() == before


def test_revoke_accepts_whatever_celerys_accepts(app: Celery, sent: list[AsyncResult]) -> None:
    """Celery does not check ids."""
    for ids in ("", None, 7, [""], [None, sent[0].id, ""]):
        app.control.revoke(ids)
    assert Delay(app).count() == 2


# ---- how many, and when -------------------------------------------------------------------


def test_an_invalid_query_is_refused(delay: Delay) -> None:
    asks: list[tuple[Callable[[], Any], str]] = [
        (lambda: delay.ls(limit=-1), "limit to be a whole number from 0, got -1"),
        (lambda: delay.ls(limit="5"), "limit to be a whole number from 0, got '5'"),  # type: ignore[arg-type]
        (lambda: delay.ls(offset=-1), "offset to be a whole number from 0, got -1"),
        (lambda: delay.ids(limit=-1), "limit to be a whole number from 0, got -1"),
        (lambda: delay.histogram(bars=0), "bars to be a whole number from 1, got 0"),
        (lambda: delay.ls(None), "a search as text or as a Query, got None"),  # type: ignore[arg-type]
        (lambda: delay.count(7), "a search as text or as a Query, got 7"),  # type: ignore[arg-type]
    ]
    for ask, said in asks:
        with pytest.raises(InvalidQuery, match=f"expected {said}"):
            ask()


def test_an_invalid_due_time_changes_nothing(delay: Delay, sent: list[AsyncResult]) -> None:
    before = delay.ls()
    moments: list[tuple[dict[str, Any], type[Exception]]] = [
        ({}, InvalidDueTime),
        ({"countdown": 5, "eta": datetime(2050, 1, 1)}, InvalidDueTime),
        ({"countdown": "5"}, InvalidDueTime),
        ({"countdown": 10**300}, DelayTooLong),
        ({"eta": 5}, InvalidDueTime),
        ({"eta": ""}, InvalidDueTime),
        ({"eta": date(2050, 1, 1)}, InvalidDueTime),
    ]
    for moment, error in moments:
        with pytest.raises(error):
            delay_headers(**moment)
        with pytest.raises(error):
            delay.reschedule(sent[0], **moment)
    with pytest.raises(DelayTooLong):  # only a broker's levels end before that
        delay.reschedule(sent[0], eta=datetime.max)
    assert delay.ls() == before


# ---- which app, which setting -------------------------------------------------------------


@pytest.mark.parametrize("made", [install, Delay, bulk, expose])
def test_anything_but_an_app_is_refused(made: Callable[[Any], Any]) -> None:
    for app in (None, "shop", Celery, object()):
        with pytest.raises(TypeError, match="expected a Celery app, got "):
            made(app)


def test_the_error_for_a_keyword_with_the_prefix_says_to_leave_the_prefix_out() -> None:
    app = Celery("shop", broker="memory://", set_as_current=False)
    with pytest.raises(SettingsError) as refused:
        install(app, native_delay_schedules=31)
    assert str(refused.value) == (
        "expected settings without their prefix here, got native_delay_schedules: write "
        "schedules=31"
    )
    with pytest.raises(SettingsError, match=r"write store=…$"):
        install(app, native_delay_store="redis://:secret@localhost")
    with pytest.raises(SettingsError, match="unknown setting native_delay_delcare; did you mean"):
        install(app, native_delay_delcare=31)
    with pytest.raises(SettingsError, match="got native_delay_declare: write declare=False"):
        settings_from_option({"native_delay_declare": False})


@pytest.mark.parametrize("window", [0, "x"])
def test_bulk_refuses_impossible_options(app: Celery, window: Any) -> None:
    with pytest.raises(ValueError, match="to be a whole number from 1, got "):
        bulk(app, window=window)

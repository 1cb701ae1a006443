"""Flower's templates with our additions, and its picture of the cluster with DELAYED tasks."""

from __future__ import annotations

import asyncio
import gc
import pickle
from pathlib import Path
from threading import Event
from time import time
from typing import Any
from weakref import ref

import flower as stock
import pytest
from celery import Celery
from celery.events.state import Task

from celery_native_delay import RecordsUnavailable, SettingsError, install
from celery_native_delay.flower.asking import Asking
from celery_native_delay.flower.patching import PATCHES, PatchedTemplates, patched
from celery_native_delay.flower.state import DELAYED, WaitingState
from celery_native_delay.records.waiting import Outcome, Verdict, Waiting

TEMPLATES = Path(stock.__file__).parent / "templates"


@pytest.fixture
def state() -> WaitingState:
    return WaitingState(max_tasks_in_memory=100)


def waiting(task_id: str = "id", due_in_seconds: float = 3600, name: str = "note") -> Waiting:
    due_us = round((time() + due_in_seconds) * 1e6)
    return Waiting(task_id, name, "(1,)", "{}", "celery", "", "celery", due_us, 0, task_id, "d")


def happens(state: WaitingState, kind: str, clock: int = 1, **fields: Any) -> str:
    """The task's state after an event of a worker, or of a client that has sent it."""
    event = {"type": f"task-{kind}", "uuid": "id", "hostname": "w1", "timestamp": time()}
    state.event(event | {"local_received": time(), "clock": clock, "pid": 1} | fields)
    assert ("id" in state.delayed) == (state.tasks["id"].state == DELAYED)
    return str(state.tasks["id"].state)


@pytest.mark.parametrize("name", PATCHES)
def test_flowers_templates_have_a_place_for_each_addition(name: str) -> None:
    text = (TEMPLATES / name).read_text()
    assert patched(name, text) != text
    PatchedTemplates().load(name)


def test_a_template_that_has_changed_too_much_stays_as_it_is() -> None:
    assert patched("navbar.html", "<nav></nav>") == "<nav></nav>"


@pytest.mark.parametrize("end", ["received", "started", "succeeded", "failed", "revoked"])
def test_whatever_a_worker_says_replaces_delayed(state: WaitingState, end: str) -> None:
    state.saw([waiting()])
    assert state.tasks["id"].state == DELAYED
    assert happens(state, end) not in (DELAYED, "PENDING")
    assert state.search_engine.search(state.tasks, "state:DELAYED").filtered_count == 0


def test_a_task_that_was_sent_for_later_is_delayed_before_the_records_are_read(
    state: WaitingState,
) -> None:
    assert happens(state, "sent", name="note", eta="2100-01-01T00:00:00+00:00") == DELAYED
    assert happens(state, "received", clock=2) == "RECEIVED"


def test_a_received_task_that_waits_again_is_delayed_and_one_that_runs_is_not(
    state: WaitingState,
) -> None:
    happens(state, "received")
    state.saw([waiting(due_in_seconds=-1)])
    assert state.tasks["id"].state == "RECEIVED"
    state.saw([waiting()])
    assert state.tasks["id"].state == DELAYED
    happens(state, "started", clock=2)
    state.saw([waiting()])
    assert state.tasks["id"].state == "STARTED"


def test_what_was_handed_over_is_pending_until_somebody_receives_it(state: WaitingState) -> None:
    state.saw([waiting()])
    state.does_not_wait(["id", "never seen"])
    assert (state.tasks["id"].state, state.delayed) == ("PENDING", {})


def test_cancelled_and_moved_tasks_show_it_at_once(state: WaitingState) -> None:
    later_us = round((time() + 7200) * 1e6)
    state.saw([waiting()])
    state.changed(Outcome("id", Verdict.DONE, later_us), cancelled=False)
    assert state.tasks["id"].state == DELAYED
    before = state.tasks["id"].eta
    state.changed(Outcome("id", Verdict.TOO_LATE), cancelled=True)
    assert (state.tasks["id"].state, state.tasks["id"].eta) == (DELAYED, before)
    state.changed(Outcome("id", Verdict.DONE), cancelled=True)
    assert state.tasks["id"].state == "REVOKED"
    assert happens(state, "received") == "REVOKED"


def test_there_are_never_more_tasks_than_flower_may_keep(state: WaitingState) -> None:
    state.saw(waiting(f"task-{number}") for number in range(250))
    assert len(state.tasks) == len(state.delayed) == 100
    assert state.search_engine.search(state.tasks, "state:DELAYED").filtered_count == 100


def test_a_saved_state_is_taken_up_ours_and_stock(state: WaitingState) -> None:
    state.saw([waiting()])
    again = pickle.loads(pickle.dumps(state))
    assert set(again.delayed) == {"id"}
    state.tasks["id"] = Task("id", cluster_state=state)
    state.saw([waiting()])
    assert happens(state, "revoked") == "REVOKED"


def test_a_question_that_hangs_is_given_up() -> None:
    asking = Asking(install(Celery("slow", broker="redis://", set_as_current=False)))
    ends = Event()
    try:
        with pytest.raises(RecordsUnavailable, match=r"within 0\.05 s"):
            asyncio.run(asking.delay(lambda _: ends.wait(20), within_seconds=0.05))
    finally:
        ends.set()
        asking.stop()


def test_an_app_that_is_not_installed_is_told_how() -> None:
    asking = Asking(Celery("plain", broker="memory://", set_as_current=False))
    for question in (asking.admin(lambda part: part.status()), asking.delay(lambda it: it.count())):
        with pytest.raises(SettingsError, match="install"):
            asyncio.run(question)
    asking.stop()


def test_a_task_that_flower_forgets_is_gone_without_the_garbage_collector(
    state: WaitingState,
) -> None:
    """What is set aside is never looked at again, so nothing of it may lead back to it."""
    state.saw([waiting()])
    task = state.tasks["id"]
    assert (task.root, task.parent, list(task.children)) == (task, None, [])
    assert task.as_dict() | {"root_id": "id"} == task.as_dict()
    happens(state, "received", name="note")
    forgotten = ref(task)
    gc.disable()
    try:
        del task
        state.saw(waiting(f"task-{number}") for number in range(100))
        assert "id" not in state.tasks
        state.clear_tasks(ready=False)
        assert forgotten() is None
    finally:
        gc.enable()

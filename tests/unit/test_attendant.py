"""The worker's thread that puts early tasks back into the broker."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any
from unittest.mock import Mock

import pytest

from celery_native_delay import ManagementUnavailable, NativeDelayError, PublishRefused
from celery_native_delay.settings import DelaySettings
from celery_native_delay.transports.interface import Rescue, Wait
from celery_native_delay.worker import attendant
from celery_native_delay.worker.attendant import Attendant, Task


@pytest.fixture
def outcomes(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[str, dict[str, str]]]:
    """Puts the tasks "a", "b" and "c" back; returns what was published, and what became of each.

    The broker answers each put-back by *answers*, in turn; None means success.
    """
    monkeypatch.setattr(attendant, "_RETRY_SECONDS", 0.0)

    def put_back(**answers: list[Exception]) -> tuple[str, dict[str, str]]:
        published: list[str] = []

        def answer(waits: Sequence[Wait]) -> list[Exception | None]:
            published.extend(wait.queue for wait in waits)
            each = (answers.get(wait.queue) for wait in waits)
            return [left.pop(0) if left else None for left in each]

        thread = Attendant(None, DelaySettings())
        monkeypatch.setattr(thread, "_part", lambda: Mock(put_back=answer))
        became: dict[str, str] = {}

        def task(name: str) -> Task:
            note = partial(became.setdefault, name)
            return Task(Wait(Mock(), name, 0), partial(note, "done"), partial(note, "held"))

        thread._put_back_or_hold([task(name) for name in "abc"])
        return "".join(published), became

    return put_back


@pytest.mark.parametrize(
    ("answers", "published", "held"),
    [
        ({"b": [OSError("nacked")]}, "abcb", ""),
        # It is kept in memory when the broker has not taken it three times.
        ({"b": [OSError("nacked")] * 9, "c": [NativeDelayError("too long")]}, "abcbb", "bc"),
        ({"a": [PublishRefused("too large")]}, "abc", "a"),  # which would repeat
    ],
)
def test_only_the_task_whose_publish_failed_is_tried_again(
    outcomes: Any, answers: dict[str, list[Exception | None]], published: str, held: str
) -> None:
    """The others are in the broker; a second publish would run them twice."""
    found, became = outcomes(**answers)
    assert found == published
    assert became == {name: "held" if name in held else "done" for name in "abc"}


def test_a_management_api_that_does_not_answer_is_not_asked_at_every_look(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each request may take seconds, in which no early task goes back."""
    thread, part = Attendant(None, DelaySettings()), Mock()
    part.watch_queues.side_effect = ManagementUnavailable("no answer")
    monkeypatch.setattr(thread, "_part", lambda: part)
    for _ in range(3):
        thread._watch_queues()
    assert part.watch_queues.call_count == 1


def test_only_the_first_look_and_one_after_a_new_binding_skip_the_pause_of_all_workers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    thread, part = Attendant(None, DelaySettings()), Mock()
    part.rescue.return_value = part.rescue_in_turn.return_value = Rescue()
    part.sweep.return_value = 0
    monkeypatch.setattr(thread, "_part", lambda: part)
    for _ in range(2):
        thread._rescue()
        thread._rescue()
        thread.look_for_parked()
    looks = [name for name, *_ in part.method_calls if name.startswith("rescue")]
    assert looks == ["rescue", "rescue_in_turn"] * 2

"""Promoters that stand by. Scripted, not on Redis: a busy machine decides who comes first there."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from celery_native_delay.transports.redis import promoter as module
from celery_native_delay.transports.redis.promoter import Promoter
from celery_native_delay.transports.redis.store import HandedOver

#: Between two messages, in microseconds.
STEP_US = 5_000


class ScriptedRounds:
    """Rounds that take as many messages as *takes* says, one number a round."""

    def __init__(self, takes: list[int]) -> None:
        self.last_asked_at = 0.0
        self.asked_count = 0
        self._takes = iter(enumerate(takes, start=1))

    def ask(self) -> None:
        self.asked_count += 1

    def answer(self) -> HandedOver:
        self.asked_count -= 1
        number, taken = next(self._takes)
        now_us = number * STEP_US
        return HandedOver(taken, taken, 0, now_us, now_us + STEP_US, "")


class RecordingAlarm:
    """Sleeps that take no time; *wakes* says, sleep by sleep, if one ended early."""

    def __init__(self, promoter: Promoter, wakes: list[bool]) -> None:
        self.lags_ms: list[float] = []
        self._promoter = promoter
        self._wakes: Iterator[bool] = iter(wakes)
        self._left = len(wakes)

    def wait(self, seconds: float) -> bool:
        self.lags_ms.append(round(seconds * 1e3 - STEP_US / 1e3, 3))
        self._left -= 1
        if not self._left:
            self._promoter.stop()
        return next(self._wakes)


def lags_ms(takes: list[int], monkeypatch: pytest.MonkeyPatch, woken: int | None = None) -> Any:
    """How much later than the next due time a promoter comes, round by round."""
    monkeypatch.setattr(module, "monotonic", lambda: 0.0)
    promoter = Promoter(lambda **_: None)
    alarm = RecordingAlarm(promoter, [number == woken for number in range(len(takes))])
    promoter._promote(ScriptedRounds(takes), alarm)  # type: ignore[arg-type]
    promoter.run()  # has been stopped: closes what it waited on
    return alarm.lags_ms


def test_who_comes_too_late_comes_later_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that of many one does the work: four that all come for each cost Redis four times."""
    assert lags_ms([1, 0, 0, 0, 0, 0, 0, 0, 0], monkeypatch) == [0, 1, 2, 4, 8, 16, 32, 50, 50]


def test_who_promotes_comes_on_time_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The one that works must not lag: a message would be late by it."""
    assert lags_ms([1, 0, 0, 1, 1, 0], monkeypatch) == [0, 1, 2, 0, 0, 1]


def test_who_is_woken_comes_on_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only one promoter is woken: no other knows of what has come."""
    assert lags_ms([1, 0, 0, 0], monkeypatch, woken=2) == [0, 1, 2, 0]

"""Idle promoters on Redis, with scripted answers: on a busy machine the order would be random."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from celery_native_delay.transports.redis import promoter as module
from celery_native_delay.transports.redis.promoter import RedisPromoter
from celery_native_delay.transports.redis.store import HandedOver

#: Between two messages, in microseconds.
STEP_US = 5_000


class ScriptedRounds:
    """Rounds that each promote the next number of messages of *takes*."""

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
    """An alarm whose sleeps take no time; *wakes* tells for each if it ended early."""

    def __init__(self, promoter: RedisPromoter, wakes: list[bool]) -> None:
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
    """The milliseconds by which a promoter lags behind the next due time, round by round."""
    monkeypatch.setattr(module, "monotonic", lambda: 0.0)
    promoter = RedisPromoter(lambda **_: None)
    alarm = RecordingAlarm(promoter, [number == woken for number in range(len(takes))])
    promoter._promote(ScriptedRounds(takes), alarm)  # type: ignore[arg-type]
    promoter.run()  # the promoter is stopped, so run() only closes its connections
    return alarm.lags_ms


@pytest.mark.parametrize(
    ("takes", "woken", "lags"),
    [
        # One of several promoters does the work: four that look cost Redis four times.
        ([1, 0, 0, 0, 0, 0, 0, 0, 0], None, [0, 1, 2, 4, 8, 16, 32, 50, 50]),
        # The promoter that works is on time, and one that was woken: a message wakes only one.
        ([1, 0, 0, 1, 1, 0], None, [0, 1, 2, 0, 0, 1]),
        ([1, 0, 0, 0], 2, [0, 1, 2, 0]),
    ],
)
def test_a_promoter_that_finds_nothing_lags_longer_each_time(
    takes: list[int], woken: int | None, lags: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert lags_ms(takes, monkeypatch, woken) == lags

"""A task that raises RetryAfter: what is retried, counted and held, also in eager mode.

The worker is Celery's consumer in this thread, on the test clock.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import pytest
from celery import Celery, Task, signals

from celery_native_delay import Rate, RetryAfter, install
from celery_native_delay.app.retrying import SINCE
from celery_native_delay.clock import Clock
from celery_native_delay.records.waiting import PLACE
from celery_native_delay.worker import telemetry
from celery_native_delay.worker.telemetry import outcome_of

RATES = {"call_api": Rate("10/s", key="tenant")}


@dataclass
class Shop:
    """An app under the clock, whose API refuses the next calls of *refused*."""

    app: Celery
    clock: Clock
    task: Task
    refused: list[RetryAfter]
    ran: list[tuple[float, str]] = field(default_factory=list)
    """The time and the tenant of each call."""
    headers: list[dict[str, Any]] = field(default_factory=list)
    outcomes: list[str] = field(default_factory=list)

    def note_retry(self, reason: Any, **_: Any) -> None:
        self.outcomes.append(outcome_of("RETRY", reason))


@contextmanager
def shop_with(*refused: RetryAfter, task: Any = None, **settings: Any) -> Iterator[Shop]:
    app = install(Celery("shop", broker="memory://", set_as_current=False), **settings)

    @app.task(bind=True, name="call_api", shared=False, **task or {})
    def call_api(self: Any, tenant: str) -> None:
        shop.ran.append((round((shop.clock.now - began).total_seconds(), 2), tenant))
        shop.headers.append(dict(self.request.headers or {}))
        if shop.refused:
            raise shop.refused.pop(0)

    with Clock(app) as clock:
        began = clock.now
        shop = Shop(app, clock, call_api, [*refused])
        signals.task_retry.connect(shop.note_retry, weak=False)
        try:
            yield shop
        finally:
            signals.task_retry.disconnect(shop.note_retry)


@pytest.mark.parametrize("options", [{}, {"autoretry_for": (Exception,)}])
def test_the_task_is_retried_first_in_its_queue_and_keeps_its_headers(options: Any) -> None:
    with shop_with(RetryAfter(30), task=options, rates=RATES) as shop:
        shop.task.apply_async(("ada",), headers={"mine": 1})
        shop.clock.advance()
        for tenant in ("ada", "bob"):
            shop.task.delay(tenant)
        shop.clock.run_all()
        assert shop.ran == [(0, "ada"), (0, "bob"), (30, "ada"), (30.1, "ada")]
        first, _, retried, other = shop.headers
        assert (first["mine"], retried["mine"]) == (1, 1)
        assert retried.keys() == {"mine", SINCE}
        assert not {SINCE, PLACE} & other.keys()
        shop.refused = [RetryAfter(30)]
        with pytest.raises(RetryAfter):
            shop.task("ada")


@pytest.mark.parametrize(("settings", "bound"), [({}, 86_400.0), ({"levels": 13}, 1023.875)])
def test_a_task_and_its_line_wait_equally_long_for_an_absurd_answer(
    settings: dict[str, Any], bound: float
) -> None:
    """At most a day, and at most the longest delay."""
    with shop_with(RetryAfter(1e12), rates=RATES, **settings) as shop:
        shop.task.delay("ada")
        shop.clock.advance()
        shop.task.delay("ada")
        shop.clock.run_all()
        assert [at for at, _ in shop.ran] == [0, round(bound, 2), pytest.approx(bound, abs=0.2)]


def test_without_a_rate_only_this_task_waits() -> None:
    with shop_with(RetryAfter(30)) as shop:
        for tenant in ("ada", "bob"):
            shop.task.delay(tenant)
        shop.clock.run_all()
        assert shop.ran == [(0, "ada"), (0, "bob"), (30, "ada")]


@pytest.mark.parametrize("counts", [False, True])
def test_a_retry_uses_up_max_retries_only_if_it_counts(counts: bool) -> None:
    refused = [RetryAfter(30, counts=counts)] * 2
    with shop_with(*refused, task={"max_retries": int(counts)}) as shop:
        shop.task.delay("ada")
        with pytest.raises(RetryAfter) if counts else nullcontext():
            shop.clock.run_all()
        assert [at for at, _ in shop.ran] == ([0, 30] if counts else [0, 30, 60])
        expected = [telemetry.RETRY] if counts else [telemetry.REQUEUED] * 2
        assert shop.outcomes == expected


def test_after_a_day_the_last_answer_is_the_error_and_still_holds_the_others() -> None:
    hours = RetryAfter(40_000)
    with shop_with(*[hours] * 4, rates=RATES) as shop:
        shop.task.delay("ada")
        with pytest.raises(RetryAfter):
            shop.clock.run_all()
        assert [at for at, _ in shop.ran] == [0, 40_000, 80_000, 120_000]
        shop.task.delay("ada")
        shop.clock.run_all()
        assert shop.ran[-1][0] == pytest.approx(160_000, abs=1)
        shop.refused = [hours]
        shop.task.apply_async(("ada",), headers={SINCE: "x"})
        with pytest.raises(RetryAfter):
            shop.clock.run_all()


@pytest.mark.parametrize("older", [True, False])
def test_in_eager_mode_the_task_is_retried_at_once_and_the_retries_count(older: bool) -> None:
    """Also if the task was made before install(), or its app was under the test clock."""
    app = Celery("shop", broker="memory://", set_as_current=False)
    app.conf.task_always_eager = True
    if not older:
        with Clock(install(app, rates=RATES)):
            pass
    calls: list[int] = []

    @app.task(name="call_api", shared=False, max_retries=5)
    def call_api(tenant: str, refusals: int) -> str:
        calls.append(1)
        if len(calls) <= refusals:
            raise RetryAfter(30)
        return tenant

    if older:
        call_api.name  # noqa: B018  makes the task
        install(app, rates=RATES)
    for call in (call_api.delay, lambda *args: call_api.apply(args)):
        calls.clear()
        assert call("ada", 4).get() == "ada"
        assert len(calls) == 5
        calls.clear()
        assert isinstance(call("ada", 9).result, RetryAfter)
        assert len(calls) == 6


def test_a_task_of_a_class_may_raise_it_whenever_it_is_registered() -> None:
    """No worker starts in this process, and would teach it."""
    app = install(Celery("shop", broker="memory://", set_as_current=False))
    app.finalize()

    class CallApi(Task):  # type: ignore[misc]
        name = "call_api"

        def run(self, refusals: int) -> int:
            if self.request.retries < refusals:
                raise RetryAfter(30)
            return int(self.request.retries)

    assert app.register_task(CallApi()).apply((2,)).get() == 2


def test_while_the_package_is_off_it_is_an_ordinary_failure() -> None:
    app = install(Celery("shop", broker="memory://", set_as_current=False), enabled=False)
    calls: list[str] = []

    @app.task(name="call_api", shared=False)
    def call_api(tenant: str) -> None:
        calls.append(tenant)
        raise RetryAfter(30)

    assert isinstance(call_api.apply(("ada",)).result, RetryAfter)
    assert calls == ["ada"]

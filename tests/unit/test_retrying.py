"""A task that raises RetryAfter: what is retried, counted and held, also in eager mode."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from time import time
from typing import Any

import pytest
from celery import Celery, Task
from celery.exceptions import Retry

from celery_native_delay import Rate, RetryAfter, install
from celery_native_delay.app import retrying
from celery_native_delay.app.retrying import SINCE
from celery_native_delay.rates.line import Asked
from celery_native_delay.records.waiting import PLACE
from celery_native_delay.worker import telemetry
from celery_native_delay.worker.telemetry import outcome_of

RATES = {"shop.call_api": Rate("10/s", key="tenant")}


class Sent:
    """What tasks would send, and the holds."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.messages: list[dict[str, Any]] = []
        self.held: list[tuple[Any, ...]] = []

        def apply_async(signature: Any, **more: Any) -> None:
            self.messages.append(dict(signature.options) | more)

        def hold(
            app: Any, task: str, limit: Asked, seconds: float, headers: dict[str, Any]
        ) -> None:
            self.held.append((task, limit.key, seconds))
            headers[PLACE] = json.dumps({limit.line: 77})

        monkeypatch.setattr(retrying, "_hold", hold)
        monkeypatch.setattr("celery.canvas.Signature.apply_async", apply_async)


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> Sent:
    return Sent(monkeypatch)


def app_with(**settings: Any) -> Celery:
    return install(Celery("shop", broker="memory://", set_as_current=False), **settings)


def refused(app: Celery, *, counts: bool = False, when: float = 30, **options: Any) -> Task:
    @app.task(bind=True, name="shop.call_api", shared=False, **options)
    def call_api(self: Any, tenant: str) -> None:
        raise RetryAfter(when, counts=counts)

    return call_api


@contextmanager
def running(task: Task, *args: Any, retries: int = 0, **headers: Any) -> Iterator[None]:
    task.push_request(
        id="1",
        args=args,
        kwargs={},
        called_directly=False,
        headers=headers,
        is_eager=False,
        retries=retries,
    )
    try:
        yield
    finally:
        task.pop_request()


@pytest.mark.parametrize(
    ("tenant", "key", "place"),
    [("ada", "ada", {"shop.call_api\nada": 77}), ("\ud800", None, {"shop.call_api": 77})],
)
@pytest.mark.parametrize("options", [{}, {"autoretry_for": (Exception,)}])
def test_the_task_is_retried_first_in_its_queue(
    sent: Sent, options: dict[str, Any], tenant: str, key: str | None, place: dict[str, int]
) -> None:
    """If its key cannot be computed, it is in the queue of tasks without a key."""
    task = refused(app_with(rates=RATES), **options)
    with running(task, tenant, mine=1), pytest.raises(Retry) as raised:
        task.run(tenant)
    assert raised.value.when == 30
    assert sent.held == [("shop.call_api", key, 30.0)]
    (message,) = sent.messages
    assert message["headers"].pop(SINCE) == pytest.approx(time(), abs=60)
    assert message["headers"] == {"mine": 1, PLACE: json.dumps(place)}
    with pytest.raises(RetryAfter):
        task("ada")


@pytest.mark.parametrize(("settings", "bound"), [({}, 86_400.0), ({"levels": 13}, 1023.875)])
def test_a_task_and_its_line_wait_equally_long_for_an_absurd_answer(
    sent: Sent, settings: dict[str, Any], bound: float
) -> None:
    """At most a day, and at most the longest delay."""
    task = refused(app_with(rates=RATES, **settings), when=1e12)
    with running(task, "ada"), pytest.raises(Retry) as raised:
        task.run("ada")
    assert raised.value.when == bound
    assert sent.held == [("shop.call_api", "ada", bound)]


def test_without_a_rate_only_this_task_waits(sent: Sent) -> None:
    task = refused(app_with())
    with running(task, "ada"), pytest.raises(Retry):
        task.run("ada")
    assert sent.held == []
    assert list(sent.messages[0]["headers"]) == [SINCE]


def test_a_retry_does_not_count_by_default(sent: Sent) -> None:
    task = refused(app_with(), max_retries=0)
    for retries in (0, 2):
        with running(task, "ada", retries=retries), pytest.raises(Retry) as raised:
            task.run("ada")
        assert raised.value.sig.options["retries"] == retries
        assert outcome_of("RETRY", raised.value) == telemetry.REQUEUED


def test_a_retry_that_counts_uses_up_max_retries(sent: Sent) -> None:
    task = refused(app_with(), counts=True, max_retries=1)
    with running(task, "ada"), pytest.raises(Retry) as raised:
        task.run("ada")
    assert raised.value.sig.options["retries"] == 1
    assert outcome_of("RETRY", raised.value) == telemetry.RETRY
    with running(task, "ada", retries=1), pytest.raises(RetryAfter):
        task.run("ada")


def test_after_the_limit_the_last_answer_is_the_error_and_still_holds_the_others(
    sent: Sent,
) -> None:
    task = refused(app_with(rates=RATES))
    with running(task, "ada", **{SINCE: time() - 86_300}), pytest.raises(Retry):
        task.run("ada")
    with running(task, "ada", **{SINCE: time() - 86_500}), pytest.raises(RetryAfter):
        task.run("ada")
    assert len(sent.held) == 2
    with running(task, "ada", **{SINCE: "x"}), pytest.raises(RetryAfter):
        task.run("ada")


@pytest.mark.parametrize("older", [True, False])
def test_in_eager_mode_the_task_is_retried_at_once_and_the_retries_count(older: bool) -> None:
    """Also if the task was made before install()."""
    app = Celery("shop", broker="memory://", set_as_current=False)
    app.conf.task_always_eager = True
    if not older:
        install(app, rates=RATES)
    calls: list[int] = []

    @app.task(name="shop.call_api", shared=False, max_retries=5)
    def call_api(tenant: str, refusals: int) -> str:
        calls.append(1)
        if len(calls) <= refusals:
            raise RetryAfter(30)
        return tenant

    if older:
        call_api.name  # noqa: B018  makes the task
        install(app, rates=RATES)
    assert call_api.delay("ada", 4).get() == "ada"
    assert len(calls) == 5
    calls.clear()
    assert isinstance(call_api.delay("ada", 9).result, RetryAfter)
    assert len(calls) == 6


def test_while_the_package_is_off_it_is_an_ordinary_failure(sent: Sent) -> None:
    task = refused(app_with(enabled=False))
    with running(task, "ada"), pytest.raises(RetryAfter):
        task.run("ada")

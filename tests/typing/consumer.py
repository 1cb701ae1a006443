"""What a user writes against the public API; mypy --strict and pyright read it, nothing runs it.

A comment ``type: ignore`` that is not needed is an error, so those below are promises as well: the
line is refused, and for this reason. Celery has no types; both checkers take it as it is.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import assert_type

from celery import Celery
from prometheus_client import CollectorRegistry

from celery_native_delay import (
    Delay,
    DelaySettings,
    DelayTooLong,
    KeyedResult,
    NativeDelayError,
    Outcome,
    Query,
    RefusedMessage,
    Verdict,
    Waiting,
    delay_headers,
    install,
    transport_for,
)
from celery_native_delay.bulk import BulkResult, bulk
from celery_native_delay.metrics import expose
from celery_native_delay.spark import FanOut
from celery_native_delay.testing import PrivateRabbitMQ, private_rabbitmq, private_redis


class Shop(Celery):
    """An app of one's own class."""

    currency: str


def installing() -> Shop:
    app = install(Shop("shop", broker="amqp://"), once={"shop.*": 28}, store="redis://")
    assert_type(app, Shop)
    install(app, store_tasks=["shop.remind"], rates={"shop.call_api": "100/m"}, enabled="drain")
    install(app, level=28)  # type: ignore[call-arg]
    install(app, once="many")  # type: ignore[arg-type]
    install(app, schedules_catch_up="some")  # type: ignore[arg-type]
    install(app, landing="orders")  # type: ignore[arg-type]
    return app


def seeing(app: Celery) -> Iterator[str]:
    delays = Delay(app)
    assert_type(delays.count("name:shop.remind"), int)
    page = delays.ls(Query.parse("ada"), limit=10)
    assert_type(page.total, int | None)
    assert_type(page[0], Waiting)
    for task in page:
        assert_type(task, Waiting)
        assert_type(task.due, datetime)
        yield task.id
    assert_type(delays.next_due(), datetime | None)
    delays.ls(limit="ten")  # type: ignore[arg-type]


def changing(app: Celery, task_id: str) -> bool:
    delays = Delay(app)
    outcome = delays.cancel(task_id)
    assert_type(outcome, Outcome)
    assert_type(outcome.verdict, Verdict)
    assert_type(delays.cancel_all([task_id]), list[Outcome])
    delays.reschedule(task_id, eta=datetime.now(UTC) + timedelta(hours=1))
    delays.reschedule(task_id, 5)  # type: ignore[call-arg]
    return bool(outcome)


def under_keys(app: Celery) -> str | None:
    result = Delay(app).unique(app.signature("shop.import"), key="import:42")
    assert_type(result, KeyedResult)
    assert_type(result.created, bool)
    assert_type(Delay(app).cancel(key="import:42", task="shop.import", kind="unique"), Outcome)
    Delay(app).cancel(key="import:42", task="shop.import", kind="once")  # type: ignore[call-overload]
    Delay(app).cancel(key="import:42")  # type: ignore[call-overload]
    return result.replaced


def sending(app: Celery) -> list[RefusedMessage]:
    bulk(app, windows=10)  # type: ignore[call-arg]
    bulk(app, window="10")  # type: ignore[arg-type]
    with bulk(app, window=10, timeout_seconds=None) as batch:
        assert_type(batch.send("shop.remind", kwargs={"order": 1}, countdown=5), str)
    assert_type(batch.result, BulkResult)
    return batch.result.refused


def fanning_out(orders: object) -> int:
    fan_out = FanOut(orders, app="shop:app", task="shop.remind", eta="due", kwargs=["order"])
    FanOut(orders, task="shop.remind")  # type: ignore[call-arg]  # needs an app
    FanOut(orders, app="shop:app", task="shop.remind", id_columns=["id"])  # type: ignore[call-arg]
    FanOut(orders, app="shop:app", task="shop.remind", smear="1 h")  # type: ignore[arg-type]
    assert_type(fan_out.run_id, str)
    return fan_out.send().confirmed


def plain_kombu() -> dict[str, str]:
    assert_type(transport_for("redis://"), str | None)
    delay_headers(5)  # type: ignore[call-arg]
    return delay_headers(countdown=0.5)


def settings() -> float:
    chosen = DelaySettings(schedules=20, namespace="shop")
    chosen.schedules = 21  # type: ignore[misc]
    assert_type(chosen.store, str | None)
    return chosen.longest_delay_seconds


def failing(app: Celery) -> str:
    try:
        Delay(app).run_now("1")
    except DelayTooLong as exc:
        error: NativeDelayError = exc
        value: ValueError = exc
        return f"{error} {value}"
    return ""


def testing() -> None:
    with private_rabbitmq() as rabbitmq, private_redis() as redis:
        assert_type(rabbitmq, PrivateRabbitMQ)
        assert_type(rabbitmq.new_vhost(), str)
        assert_type(redis.url, str)


def measuring(app: Celery) -> None:
    expose(app, CollectorRegistry(), poll_seconds=10).close()

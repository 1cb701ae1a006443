"""Brokers that hang: they answer nothing, and their connections stay open (SIGSTOP)."""

from __future__ import annotations

import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from time import monotonic
from typing import Any
from unittest.mock import Mock

import pytest
from celery import Celery
from kombu.exceptions import OperationalError

from celery_native_delay import Delay, Rate, StoreUnavailable, install
from celery_native_delay.app import broker
from celery_native_delay.app.runs import runs_of
from celery_native_delay.testing import PrivateRabbitMQ, PrivateRedis
from tests.brokers import on_one_version
from tests.hanging import hung
from tests.traffic import send_task
from tests.waiting import PATIENCE_SECONDS

TIMEOUT_SECONDS = 0.5

CALLS: list[Callable[[Celery], object]] = [
    lambda app: Delay(app).count(),
    lambda app: Delay(app).cancel("order-1"),
    lambda app: Delay(app).hold("shop.order"),
    lambda app: list(Delay(app).schedules()),
    lambda app: Delay(app).rates(),
    lambda app: Delay(app).set_rate("shop.order", None, "5/s"),
    lambda app: Delay(app).unique(app.signature("shop.order"), key="1", countdown=60),
    lambda app: runs_of(app, 5),
]


def shop(url: str, **settings: Any) -> Celery:
    app = Celery("shop", broker=url, set_as_current=False)
    app.conf.broker_connection_timeout = TIMEOUT_SECONDS
    limits = {"rates": {"shop.order": Rate("10/s")}, "store_timeout_seconds": TIMEOUT_SECONDS}
    return install(app, **limits | settings)


@pytest.mark.parametrize("server_name", ["redis"], indirect=True)
@pytest.mark.parametrize("connected", [False, True])
def test_each_call_raises_in_time_while_the_redis_broker_hangs(
    empty_redis: PrivateRedis, connected: bool
) -> None:
    """On a new connection, and on one of the pool. The calls work again when Redis does."""

    def asked(call: Callable[[Celery], object]) -> float:
        began = monotonic()
        with pytest.raises((OperationalError, StoreUnavailable)):
            call(app)
        return monotonic() - began

    with closing(shop(empty_redis.url)) as app, ThreadPoolExecutor(len(CALLS)) as threads:
        if connected:
            list(threads.map(lambda call: call(app), CALLS))
        with hung(empty_redis):
            seconds = list(threads.map(asked, CALLS, timeout=PATIENCE_SECONDS))
        assert max(seconds) < PATIENCE_SECONDS
        assert Delay(app).count() >= 0


@pytest.mark.ci
def test_the_store_answers_while_rabbitmq_hangs(
    mortal_rabbitmq: PrivateRabbitMQ, tmp_path: Path
) -> None:
    """Also on a connection of the pool, which first waits for an answer of RabbitMQ."""
    url = mortal_rabbitmq.new_vhost()
    with closing(shop(url, store=f"sqlite:///{tmp_path}/delays.db", store_tasks=("*",))) as app:
        send_task(app, 1, countdown=600)
        for _ in range(2):
            with hung(mortal_rabbitmq):
                assert Delay(app).count() == 1
            assert Delay(app).count() == 1


@on_one_version
def test_a_story_is_told_although_rabbitmq_has_closed_the_connection(
    vhost_url: str, tmp_path: Path
) -> None:
    """RabbitMQ was restarted, or the process slept longer than the heartbeat."""
    with closing(shop(vhost_url, store=f"sqlite:///{tmp_path}/delays.db")) as app:
        send_task(app, 1, countdown=600)
        assert Delay(app).run_now("order-1")
        told = Delay(app).story("order-1")
        with broker.bounded(app) as connection:
            connection.connection.transport.sock.shutdown(socket.SHUT_RDWR)
        again = Delay(app).story("order-1")
        assert len(again) == len(told)
        assert "nothing promotes" in again[-1]


def test_several_calls_wait_once_for_a_broker_that_is_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each attempt takes seconds if it hangs, and the store has the answers."""
    attempt = Mock(wraps=broker._open)
    monkeypatch.setattr(broker, "_open", attempt)
    monkeypatch.setattr(broker, "AWAY_SECONDS", PATIENCE_SECONDS)
    with closing(shop("amqp://127.0.0.1:1", store=f"sqlite:///{tmp_path}/delays.db")) as app:
        send_task(app, 1, countdown=600)
        assert [Delay(app).count() for _ in range(3)] == [1, 1, 1]
        assert Delay(app).cancel("order-1")
    attempt.assert_not_called()  # the first send found out

"""``bulk(app)`` waits for an unreachable broker once, and does not wait after a refused login."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from time import monotonic
from typing import Any

import pytest
from celery import Celery

from celery_native_delay import install
from celery_native_delay.bulk import bulk
from celery_native_delay.testing import PrivateRabbitMQ, private_redis, require_redis
from celery_native_delay.transports import outbox
from pytest_celery_native_delay import installed
from tests.brokers import on_one_version
from tests.integration.traffic import SETTINGS

#: How long a batch waits for an unreachable broker.
PATIENCE_SECONDS = outbox.PATIENCE_SECONDS

NOBODY = "127.0.0.1:1"


def make_app(url: str, **settings: Any) -> Celery:
    use_ssl = settings.pop("use_ssl", None)
    app = Celery("shop", broker=url, set_as_current=False)
    app.conf.update(task_ignore_result=True, broker_use_ssl=use_ssl)
    return install(app, **(SETTINGS | {"levels": 16} | settings))


def answer_of(app: Celery) -> tuple[str, float]:
    """The error of sending a task, and the seconds until the batch has ended."""
    begun = monotonic()
    with pytest.raises(Exception, match=r"\S") as raised, bulk(app, check=False) as batch:
        batch.send("shop.remind", countdown=60)
    assert batch.result.sent == 0
    assert batch.has_given_up
    return f"{type(raised.value).__name__}: {raised.value}", monotonic() - begun


def with_user(url: str, user: str) -> str:
    return url.replace("//guest:guest@", f"//{user}:{user}@")


@on_one_version
@pytest.mark.ci
@pytest.mark.parametrize(
    ("broken", "said"),
    [
        (lambda url: url.replace("guest:guest@", "guest:wrong@"), "ACCESS_REFUSED"),
        (lambda url: f"{url.rpartition('/')[0]}/nowhere", "vhost nowhere not found"),
        (lambda url: with_user(url, "stranger"), "refused for user 'stranger'"),
    ],
    ids=["password", "vhost", "permission"],
)
def test_a_login_that_rabbitmq_refuses_is_not_retried(
    rabbitmq: PrivateRabbitMQ, vhost_url: str, broken: Callable[[str], str], said: str
) -> None:
    with suppress(Exception):  # from the test before
        rabbitmq.rabbitmqctl("add_user", "stranger", "stranger")
    text, seconds = answer_of(make_app(broken(vhost_url)))
    assert said in text
    assert seconds < PATIENCE_SECONDS / 2


@pytest.fixture(scope="module")
def locked_redis_url() -> Iterator[str]:
    """A Redis with the password "secret"."""
    installed(require_redis, "redis")
    with private_redis(server="redis", password="secret") as redis:
        yield redis.url


@pytest.mark.parametrize(
    ("broken", "said"),
    [
        (lambda url: url.replace("secret", "wrong"), "invalid username-password pair"),
        (lambda url: url.replace(":secret@", ""), "Authentication required"),
        (lambda url: f"{url.rpartition('/')[0]}/99", "DB index is out of range"),
    ],
    ids=["password", "none", "database"],
)
def test_a_login_that_redis_refuses_is_not_retried(
    locked_redis_url: str, broken: Callable[[str], str], said: str
) -> None:
    text, seconds = answer_of(make_app(broken(locked_redis_url)))
    assert said in text
    assert seconds < PATIENCE_SECONDS / 2


@pytest.mark.parametrize(
    "url",
    [
        pytest.param(f"amqp://{NOBODY}", id="rabbitmq", marks=pytest.mark.ci),
        pytest.param(f"redis://{NOBODY}", id="redis"),
        pytest.param(
            f"sqla+postgresql+psycopg://postgres@{NOBODY}/shop", id="store", marks=pytest.mark.ci
        ),
    ],
)
def test_an_outage_is_waited_for_once_per_batch(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outbox, "PATIENCE_SECONDS", 10.0)
    took = []
    with bulk(make_app(url), check=False) as batch:
        for _ in range(5):
            begun = monotonic()
            with suppress(Exception):
                batch.send("shop.remind", countdown=60)
            took.append(monotonic() - begun)
    assert batch.result.sent == 0
    assert took[0] > 10
    # Each further task is tried once.
    assert max(took[1:]) < 10

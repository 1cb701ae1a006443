"""``bulk(app)`` waits for an unreachable broker once, and does not wait after a refused login."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from time import monotonic

import pytest
from celery import Celery

from celery_native_delay import install
from celery_native_delay.bulk import bulk
from celery_native_delay.testing import PrivateRabbitMQ, private_redis, require_redis
from celery_native_delay.transports import outbox
from pytest_celery_native_delay import installed
from tests.brokers import on_one_version
from tests.integration.traffic import SETTINGS

NOBODY = "127.0.0.1:1"


def make_app(url: str) -> Celery:
    app = Celery("shop", broker=url, set_as_current=False)
    app.conf.task_ignore_result = True
    return install(app, **(SETTINGS | {"levels": 16}))


@pytest.fixture(scope="module")
def locked_redis_url() -> Iterator[str]:
    """A Redis with the password "secret"."""
    installed(require_redis, "redis")
    with private_redis(server="redis", password="secret") as redis:
        yield redis.url


def place_of(url: str) -> str:
    return url.rpartition("/")[0]


@on_one_version
@pytest.mark.ci
def test_a_login_that_rabbitmq_refuses_is_not_retried(
    rabbitmq: PrivateRabbitMQ, vhost_url: str
) -> None:
    rabbitmq.rabbitmqctl("add_user", "stranger", "stranger")
    assert_refused_at_once(
        {
            vhost_url.replace("guest:guest@", "guest:wrong@"): "ACCESS_REFUSED",
            f"{place_of(vhost_url)}/nowhere": "vhost nowhere not found",
            vhost_url.replace("guest:guest@", "stranger:stranger@"): "refused for user 'stranger'",
        }
    )


def test_a_login_that_redis_refuses_is_not_retried(locked_redis_url: str) -> None:
    assert_refused_at_once(
        {
            locked_redis_url.replace("secret", "wrong"): "invalid username-password pair",
            locked_redis_url.replace(":secret@", ""): "Authentication required",
            f"{place_of(locked_redis_url)}/99": "DB index is out of range",
        }
    )


def assert_refused_at_once(said: dict[str, str]) -> None:
    for url, reason in said.items():
        begun = monotonic()
        with pytest.raises(Exception, match=reason), bulk(make_app(url), check=False) as batch:
            batch.send("shop.remind", countdown=60)
        assert monotonic() - begun < outbox.PATIENCE_SECONDS / 2
        assert (batch.result.sent, batch.has_given_up) == (0, True)


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

"""pytest fixtures: a clock that runs delayed tasks, a private RabbitMQ and a private Redis.

pytest loads this module in every run, even in projects that do not use the fixtures. Therefore this
module imports the package, Celery and kombu only when a test uses a fixture.

| fixture | scope | value |
| --- | --- | --- |
| `native_delay_clock` | test | :class:`celery_native_delay.clock.Clock` of `native_delay_app` |
| `native_delay_app` | test | Celery's current app; a project may override this fixture |
| `native_delay_rabbitmq` | session | :class:`celery_native_delay.testing.PrivateRabbitMQ` |
| `native_delay_rabbitmq_url` | test | AMQP URL of a virtual host for one test, deleted later |
| `native_delay_redis` | session | :class:`celery_native_delay.testing.PrivateRedis` |
| `native_delay_redis_url` | test | URL of database 0 of this Redis, emptied before and after |

If the broker is not installed, the test is skipped with a message that says what to install. In CI
(the environment variable `CI` is `true` or `1`) the test fails instead. If a test kills a server,
the next test starts the server again. With pytest-xdist, every worker process has its own servers.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, ParamSpec, TypeVar

import pytest

if TYPE_CHECKING:
    from celery import Celery

    from celery_native_delay.clock import Clock
    from celery_native_delay.testing import PrivateRabbitMQ, PrivateRedis

IN_CI = os.environ.get("CI", "").lower() in ("1", "true")


P = ParamSpec("P")
T = TypeVar("T")


def installed(require: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Return the result of *require*; skip the test if *require* raises BrokerMissing.

    The only exception: in CI, the test fails instead.
    """
    from celery_native_delay.testing import BrokerMissing

    try:
        return require(*args, **kwargs)
    except BrokerMissing as exc:
        missing = str(exc)
    if IN_CI:
        pytest.fail(missing, pytrace=False)
    pytest.skip(missing)


@pytest.fixture
def native_delay_app() -> Celery:
    """Celery's current app, for `native_delay_clock`; a project may override this fixture."""
    from celery import current_app

    app: Celery = current_app._get_current_object()
    return app


@pytest.fixture
def native_delay_clock(native_delay_app: Celery) -> Iterator[Clock]:
    """A :class:`Clock` for the test: runs delayed tasks without a broker."""
    from celery_native_delay.clock import Clock

    with Clock(native_delay_app) as clock:
        yield clock


@pytest.fixture(scope="session")
def native_delay_rabbitmq() -> Iterator[PrivateRabbitMQ]:
    """A private RabbitMQ server, shared by all tests of the session."""
    from celery_native_delay.testing import private_rabbitmq, require_rabbitmq

    installed(require_rabbitmq)
    with private_rabbitmq() as rabbitmq:
        yield rabbitmq


@pytest.fixture
def native_delay_rabbitmq_url(native_delay_rabbitmq: PrivateRabbitMQ) -> Iterator[str]:
    """The AMQP URL of an empty virtual host, which is deleted after the test."""
    from celery_native_delay.testing import vhost_name

    native_delay_rabbitmq.start()
    url = native_delay_rabbitmq.new_vhost()
    yield url
    native_delay_rabbitmq.start()
    native_delay_rabbitmq.delete_vhost(vhost_name(url))


@pytest.fixture(scope="session")
def native_delay_redis() -> Iterator[PrivateRedis]:
    """A private Redis or Valkey server, shared by all tests of the session."""
    from celery_native_delay.testing import private_redis, require_redis

    installed(require_redis)
    with private_redis() as redis:
        yield redis


@pytest.fixture
def native_delay_redis_url(native_delay_redis: PrivateRedis) -> Iterator[str]:
    """The URL of database 0 of the private Redis, emptied before and after the test."""
    native_delay_redis.start()
    native_delay_redis.client.flushall()
    yield native_delay_redis.url
    native_delay_redis.start()
    native_delay_redis.client.flushall()

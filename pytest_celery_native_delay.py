"""pytest fixtures: a private RabbitMQ and a private Redis, started when a test first needs them.

pytest loads this module by its entry point, in every run, also of other projects. Therefore it
imports neither the package nor Celery nor kombu before a test needs a broker.

| fixture | per | what it is |
| --- | --- | --- |
| `native_delay_rabbitmq` | session | :class:`celery_native_delay.testing.PrivateRabbitMQ` |
| `native_delay_rabbitmq_url` | test | url of an empty virtual host there, deleted afterwards |
| `native_delay_redis` | session | :class:`celery_native_delay.testing.PrivateRedis` |
| `native_delay_redis_url` | test | url of its database 0, emptied before and afterwards |

If the broker is not installed, the test is skipped with a message that says what to install; in CI
(the environment variable `CI` is `true` or `1`) it fails. A server that a test killed is started
again for the next test. With pytest-xdist every process has its own.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, ParamSpec, TypeVar

import pytest

if TYPE_CHECKING:
    from celery_native_delay.testing import PrivateRabbitMQ, PrivateRedis

IN_CI = os.environ.get("CI", "").lower() in ("1", "true")


P = ParamSpec("P")
T = TypeVar("T")


def installed(require: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """The result of *require*; on BrokerMissing the test is skipped, or fails in CI."""
    from celery_native_delay.testing import BrokerMissing

    try:
        return require(*args, **kwargs)
    except BrokerMissing as exc:
        missing = str(exc)
    if IN_CI:
        pytest.fail(missing, pytrace=False)
    pytest.skip(missing)


@pytest.fixture(scope="session")
def native_delay_rabbitmq() -> Iterator[PrivateRabbitMQ]:
    """A private node of this machine's RabbitMQ, which all tests of the session share."""
    from celery_native_delay.testing import private_rabbitmq, require_rabbitmq

    installed(require_rabbitmq)
    with private_rabbitmq() as rabbitmq:
        yield rabbitmq


@pytest.fixture
def native_delay_rabbitmq_url(native_delay_rabbitmq: PrivateRabbitMQ) -> Iterator[str]:
    """The URL of an empty virtual host for one test."""
    from celery_native_delay.testing import vhost_name

    native_delay_rabbitmq.start()
    url = native_delay_rabbitmq.new_vhost()
    yield url
    native_delay_rabbitmq.start()
    native_delay_rabbitmq.delete_vhost(vhost_name(url))


@pytest.fixture(scope="session")
def native_delay_redis() -> Iterator[PrivateRedis]:
    """A private Redis or Valkey, which all tests of the session share."""
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

"""A RabbitMQ that runs already, for the tests: ``NATIVE_DELAY_TEST_RABBITMQ_URL``.

The tests then start no RabbitMQ of their own. Each test gets a virtual host, which it deletes. A
test that stops the broker, or needs a configuration of its own, is skipped.
"""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path
from typing import Any, NoReturn
from urllib.parse import unquote, urlsplit

import pytest

from celery_native_delay.testing import PrivateRabbitMQ
from celery_native_delay.testing.rabbitmq import RabbitMQInstallation

URL = os.environ.get("NATIVE_DELAY_TEST_RABBITMQ_URL", "")
"""The AMQP URL; its user must be an administrator. Empty: the tests start their own RabbitMQ."""

MANAGEMENT_URL = os.environ.get("NATIVE_DELAY_TEST_RABBITMQ_MANAGEMENT_URL", "")
"""The URL of its management API; by default port 15672 of its host."""


class GivenRabbitMQ(PrivateRabbitMQ):
    """A RabbitMQ that the tests did not start, and cannot stop."""

    def __init__(self, url: str, management_url: str = "") -> None:
        parts = urlsplit(url)
        self.ip, self.port = parts.hostname or "127.0.0.1", parts.port or 5672
        self._user = unquote(parts.username or "guest")
        self._password = unquote(parts.password or "guest")
        self.management = True
        self._management_url = management_url or f"http://{self.ip}:15672"
        overview = self.api("GET", "/overview")
        self.version, self.name = overview["rabbitmq_version"], overview["node"]
        self.installation = RabbitMQInstallation(Path("given"), self.version)

    @property
    def url(self) -> str:
        return self.url_of("/")

    @property
    def management_url(self) -> str:
        return self._management_url

    def url_of(self, vhost: str, user: str = "", password: str = "") -> str:
        return super().url_of(vhost, user or self._user, password or self._password)

    def start(self, **_: Any) -> None:
        """Do nothing: the broker runs."""

    def close(self) -> None:
        """Do nothing: the broker runs on."""

    def log_tail(self, lines: int = 30) -> str:
        return ""

    def _skip(self, *_: Any, **__: Any) -> NoReturn:
        pytest.skip("this test controls its RabbitMQ, but NATIVE_DELAY_TEST_RABBITMQ_URL is set")

    stop = kill = pause = resume = rabbitmqctl = data_dir = pid = _skip  # type: ignore[assignment]


@cache
def given_rabbitmq() -> GivenRabbitMQ | None:
    """The RabbitMQ of ``NATIVE_DELAY_TEST_RABBITMQ_URL``, or None if it is not set."""
    return GivenRabbitMQ(URL, MANAGEMENT_URL) if URL else None

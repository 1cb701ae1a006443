"""Places on RabbitMQ out of which messages are moved: queues, gone through in order.

Out of levels each message is taken by ``basic.get``: none is fetched ahead, so a process that dies
returns one. An ordinary queue is consumed instead: a quorum queue returns what one consumer had in
order, and what was got one by one in any.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from time import time_ns
from typing import Any

import amqp
from amqp.exceptions import AMQPError, NotFound

from ...errors import CannotDelay, LedgerUnavailable
from ...keyed.records import KeyRecords
from ...settings import DelaySettings
from ..interface import Answer, Receipts
from ..moving import Found, Moving, Source, Stays, Void
from .body import received
from .channels import OwnChannel
from .declaring import permissions_explained
from .delays import Delays
from .elsewhere import deliveries_of, read_ours
from .ledger.entry import member_of
from .ledger.keyed import ledger_key_records
from .ledger.ledger import RabbitMQLedger, Standing
from .parking import Arrivals
from .topology import Topology
from .worker_part import receipts_of

#: A message that a quorum queue has had to take back so often is not taken from it again: RabbitMQ
#: 4 throws it away at its 21st return.
_MOST_DELIVERIES = 12

#: AMQP has no room for a larger prefetch, and what stays counts as fetched until the end.
_MOST_LOOKED_AT = 65_535

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
            for message in self._messages(self._channel, queue, count):
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

    def _messages(self, channel: amqp.Channel, queue: str, count: int) -> Iterator[amqp.Message]:
        """The first *count* of *queue*, or fewer if it has no more."""
        for _ in range(count):
            message = channel.basic_get(queue)
            if message is None:
                return
            yield message

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


class IdleQueueSource(QueueSource):
    """An ordinary queue that nothing consumes."""

    def count(self) -> int:
        """Messages that are ready.

        Raises:
            CannotDelay: it has consumers, or is not there.
        """
        (queue,) = self._queues
        try:
            with permissions_explained(self._delays.topology):
                declared = self._delays.declarer.channel.queue_declare(queue, passive=True)
        except NotFound as exc:
            raise CannotDelay(f"there is no queue {queue!r}") from exc
        consumers = declared.consumer_count
        if consumers:
            raise CannotDelay(
                f"the queue {queue!r} has {consumers} consumer(s): stop its workers first. Tasks "
                f"that they hold are not in the queue, and come back when they stop; what is "
                f"looked at would be kept from them. Installed workers put them back by themselves"
            )
        count = super().count()
        if count > _MOST_LOOKED_AT:
            raise CannotDelay(
                f"the queue {queue!r} holds {count} messages, and at most {_MOST_LOOKED_AT} can be "
                f"looked at: let an installed worker consume it, which puts such tasks back"
            )
        return count

    def _messages(self, channel: amqp.Channel, queue: str, count: int) -> Iterator[amqp.Message]:
        arrivals = Arrivals(channel, queue, prefetch=count)
        for _ in range(count):
            if not (arrived := arrivals.take(1)):
                return
            yield arrived[0]


class SetSource(QueueSource):
    """The levels of one of our own sets; what its ledger says of each message holds."""

    def __init__(
        self, delays: Delays, topology: Topology, settings: DelaySettings, *, here: bool
    ) -> None:
        """*settings* are those of the app; *here*: what is moved stays on this broker."""
        # The longest first: what hops meanwhile is met further down.
        queues = [hop.queue for hop in reversed(topology.level_queues)]
        super().__init__(delays, topology.name, queues, self._read_set)
        self._topology = topology
        self._settings = settings
        is_own = topology.settings.namespace == settings.namespace
        self.keeps_keys = here and is_own
        #: The one ledger of both sets, in which what is moved stays as it is.
        self._shares_ledger = here and settings.ledger_url is not None and is_own
        self._ledger: RabbitMQLedger | None = None
        self._receipts: Receipts | None = None

    def key_records(self) -> KeyRecords | None:
        settings = self._topology.settings
        if settings.ledger_url is None:
            return None
        return ledger_key_records(settings, self._delays.connection.virtual_host)

    def found(self) -> Iterator[Found]:
        if self._shares_ledger:
            self._ledger = RabbitMQLedger(self._delays, self._settings)
        else:
            self._receipts = self._its_receipts()
        yield from super().found()

    def close(self) -> None:
        super().close()
        for each in (self._ledger, self._receipts):
            if each is not None:
                each.close()

    def _its_receipts(self) -> Receipts | None:
        settings, declarer = self._topology.settings, self._delays.declarer
        decisions = self._topology.ledger.of_decisions[0].name
        if settings.streams_ledger and not declarer.has_queue(decisions, if_refused=True):
            return None
        return receipts_of(settings, self._topology, self._delays.connection)

    def _read_set(self, *message: Any, **_: Any) -> Found:
        found = read_ours(*message)
        if not isinstance(found, Moving) or found.delayed.cancelled:
            return found
        if self._ledger is not None:
            return self._by_ledger(self._ledger, found)
        if self._receipts is not None:
            return self._by_receipts(self._receipts, found)
        return found

    def _by_ledger(self, ledger: RabbitMQLedger, found: Moving) -> Found:
        member = member_of(found.headers, found.delayed.delivery_id)
        match None if member is None else ledger.standing(member):
            case Standing.VOID:
                return Void()
            case Standing.KNOWN:
                return replace(found, known=True)
        return found

    def _by_receipts(self, receipts: Receipts, found: Moving) -> Found:
        match receipts.may_run(found.headers, found.delayed):
            case Answer.RUN:
                # Elsewhere no decision says that it counts.
                return replace(found, delayed=found.delayed._replace(replaces=None))
            case Answer.DROP:
                return Void()
            case Answer.NOT_YET:
                return Stays("it is being rescheduled")
        raise LedgerUnavailable(
            f"the ledger of {self.name} does not say which of its tasks were cancelled or moved; "
            f"run this again when it does"
        )


class ForeignSource(QueueSource):
    """NServiceBus' levels, whose messages are none that a worker would understand."""

    _WHY = (
        "NServiceBus' endpoints wait for it, with headers of their own: leave it to mature, or use "
        "its own `rabbitmq-transport delays migrate`"
    )

    def __init__(self, delays: Delays, queues: Sequence[str]) -> None:
        name = re.sub(r"\d\d$", "*", queues[0])
        super().__init__(delays, name, queues, lambda *_, **__: Stays(self._WHY))

    def found(self) -> Iterator[Found]:
        """One for each message there is; none is taken."""
        for _ in range(self.count()):
            yield Stays(self._WHY)

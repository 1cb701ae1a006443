"""Move waiting messages into this package's delay queues, for ``delay migrate``.

The module fetches each message with ``basic.get``, without a prefetch. A crash would raise the
delivery count of all prefetched messages, and RabbitMQ 4 drops messages with a high count.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cached_property, partial
from time import time_ns
from typing import Any

import amqp
from amqp.exceptions import AMQPError, MessageNacked, NotFound

from ...errors import CannotDelay, ManagementUnavailable, RecordsUnavailable, UnsupportedBroker
from ...keyed.records import KeyRecords
from ...records.interface import IndexEntry, MessageState
from ...records.publishing import RecordedPublish
from ...settings import DelaySettings
from ..moving import Found, Moving, MovingPart, Reach, Source, Void
from ..recorded import member_of, records_beside
from .channels import OwnChannel, Publication, WindowChannel, received
from .declaring import permissions_explained
from .delays import Delays
from .elsewhere import (
    CelerysLevels,
    celerys_levels,
    deliveries_of,
    read_celerys,
    read_ours,
    sets_of,
)
from .entry import Entry
from .management import ManagementAPI, management_of
from .topology import Topology

#: The migration stops at a message that was returned to its quorum queue more often than this.
#: RabbitMQ 4 drops a message at its 21st return.
_MOST_DELIVERIES = 12

#: A function that reads a message: its body, properties and delivery info, and *now_us*.
Read = Callable[..., Found]


class QueueSource(Source):
    """Reads the waiting messages of several queues, one queue after another."""

    def __init__(self, delays: Delays, name: str, queues: Sequence[str], read: Read) -> None:
        self.name = name
        self._delays = delays
        self._queues = queues
        self._read = read
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
                message = received(message)
                own = message.body, message.properties, message.delivery_info
                yield self._read(*own, now_us=time_ns() // 1000)
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


class SetSource(QueueSource):
    """Reads the waiting messages of all delay queues with one name prefix."""

    def __init__(
        self, delays: Delays, topology: Topology, settings: DelaySettings, *, here: bool
    ) -> None:
        # The longest TTL comes first: a message that moves to a shorter one is found later.
        queues = [hop.queue for hop in reversed(topology.level_queues)]
        super().__init__(delays, topology.name, queues, self._read_set)
        self._topology = topology
        #: True if messages stay on this broker (*here*), and both sets of levels share the records.
        self.keeps_keys = here and topology.settings.namespace == settings.namespace

    @cached_property
    def _records(self) -> Any:
        return records_beside(self._topology.settings, self._delays.connection.virtual_host)

    def key_records(self) -> KeyRecords | None:
        return None if self._records is None else KeyRecords(self._records)

    def _read_set(self, *message: Any, **_: Any) -> Found:
        found = read_ours(*message)
        if not isinstance(found, Moving) or found.delayed.cancelled:
            return found
        member = member_of(found.headers, found.delayed.delivery_id)
        if self._records is None or member is None:
            return found
        if not self.keeps_keys:
            may_run = self._records.received(member)  # the former records forget the message
            if may_run is None:
                raise RecordsUnavailable(
                    f"the records of {self.name}, which tell its cancelled tasks, are unreachable: "
                    f"run this again when they answer"
                )
            return found if may_run else Void()
        match self._records.state_of(member):
            case MessageState.VOID:
                return Void()
            case MessageState.KNOWN:
                return replace(found, known=True)
        return found


class RabbitMQMovingPart(MovingPart):
    def __init__(self, channel: Any, settings: DelaySettings) -> None:
        super().__init__(channel)
        self._delays: Delays = channel.delays
        self._settings = settings
        self._topology = self._delays.topology
        self.name: str = self._topology.name
        self._plain: WindowChannel | None = None

    # --- into our levels -----------------------------------------------------------------

    def prepare(self, queues: Sequence[Any]) -> None:
        with permissions_explained(self._topology):
            super().prepare(queues)
            self._delays.prepare(consuming=True)

    def take_in(self, moving: Moving, keyed: RecordedPublish | None = None) -> bool:
        if self._settings.drains:
            self._publish_plainly(moving.as_plain())
            return not moving.again
        member = member_of(moving.headers, moving.delayed.delivery_id)
        if moving.again and not moving.known and self._is_in_records(member):
            return True
        message = amqp.Message(moving.body, **moving.properties)
        self._delays.check_reach(moving.delayed.due_us)
        try:
            if keyed is not None:
                self._delays.publish_keyed(keyed, message, moving.delayed)
                return not moving.again
            self._delays.put_back(message, moving.delayed, recorded=False)
        except NotFound as exc:
            raise CannotDelay(f"there is no exchange {moving.delayed.exchange!r}") from exc
        except MessageNacked as exc:
            raise CannotDelay(str(exc)) from exc
        self._record(moving, member)
        return not moving.again

    def _publish_plainly(self, moving: Moving) -> None:
        """Publish a task with an ETA to its own exchange, or to its only queue."""
        delayed = moving.delayed
        where = delayed.exchange, delayed.routing_key
        if delayed.queue is not None:
            where = "", delayed.queue
        publication = Publication(amqp.Message(moving.body, **moving.properties), *where)
        channel = self._plain = self._plain or WindowChannel(self._delays.connection)
        try:
            channel.send(publication)
            channel.wait_all(timeout_seconds=self._settings.confirm_timeout_seconds)
        except NotFound as exc:
            self._plain = None  # RabbitMQ has closed the channel
            raise CannotDelay(f"there is no exchange {delayed.exchange!r}") from exc
        except MessageNacked as exc:
            raise CannotDelay(str(exc)) from exc
        if channel.take_returned():
            raise CannotDelay(
                f"no queue is bound to the exchange {where[0]!r} with the routing key {where[1]!r}"
            )

    def _record(self, moving: Moving, member: str | None) -> None:
        records, delayed = self._delays.records, moving.delayed
        is_over = delayed.cancelled or delayed.due_us <= time_ns() // 1000
        if records is None or member is None or moving.known or is_over:
            return
        where = delayed.exchange, delayed.routing_key, delayed.queue
        entry = Entry(moving.properties, moving.body, *where, delayed.expires_ms)
        records.note(IndexEntry(member, delayed.due_us, entry.encoded()))

    def _is_in_records(self, member: str | None) -> bool:
        records = self._delays.records
        if records is None or member is None:
            return False
        with suppress(RecordsUnavailable):
            return bool(records.state_of(member) is MessageState.KNOWN)
        return False

    # --- sources -------------------------------------------------------------------------

    def own_sources(self) -> list[Source]:
        found = [self._topology, *self._topologies("", here=True)]
        return [SetSource(self._delays, each, self._settings, here=True) for each in found]

    def sources(self, what: str | None, reaches: Sequence[Reach]) -> list[Source]:
        kind, _, name = (what or "").partition(":")
        match kind:
            case "":
                return [*self._celerys("", reaches), *self._sets("", here=False)]
            case "celery":
                return self._celerys(name, reaches)
            case "sets":
                return self._sets(name, here=True)
        raise UnsupportedBroker(
            f"expected celery, celery:PREFIX, sets, sets:NAMESPACE or the URL of another broker, "
            f"got {what!r}"
        )

    def _celerys(self, prefix: str, reaches: Sequence[Reach]) -> list[Source]:
        found = [CelerysLevels(prefix)]
        if not prefix:
            with suppress(ManagementUnavailable):
                found = celerys_levels(self._api.names("queues", containing="celery_delayed_"))
        read = partial(read_celerys, reaches=reaches)
        return [QueueSource(self._delays, levels.name, levels.queues, read) for levels in found]

    def _sets(self, name: str, *, here: bool) -> list[Source]:
        found = self._topologies(name, here=here)
        return [SetSource(self._delays, each, self._settings, here=here) for each in found]

    def _topologies(self, name: str, *, here: bool) -> list[Topology]:
        """Return the topology of each name prefix of delay queues.

        If *here* is True, ``delay migrate`` moves messages within this broker, into the app's own
        delay queues. So the app's own delay queues are not in the result.
        """
        wanted = name or self._settings.namespace
        try:
            names = self._api.names("queues", containing="level-")
        except ManagementUnavailable as exc:
            # A full name needs no search.
            names = [wanted] if here or name else [self.name]
            if not sets_of(names, self._settings):
                raise ManagementUnavailable(
                    f"sets of levels cannot be listed: {exc}; or give a full name, such as "
                    f"--from sets:{self.name}"
                ) from exc
        return [
            topology
            for topology in map(Topology, sets_of(names, self._settings))
            if wanted in (topology.name, topology.settings.namespace)
            and not (here and topology.name == self.name)
        ]

    @property
    def _api(self) -> ManagementAPI:
        return management_of(self._delays.connection.client, self._settings)

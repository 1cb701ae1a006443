"""Moving what waits on RabbitMQ: out of Celery's own levels and earlier sets; into ours."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from time import time_ns
from typing import Any

import amqp
from amqp.exceptions import MessageNacked, NotFound

from ...errors import CannotDelay, ManagementUnavailable, RecordsUnavailable, UnsupportedBroker
from ...keyed.publishing import KeyedPublish
from ...keyed.records import KeyRecords
from ...records.interface import MessageState
from ...settings import DelaySettings
from ..moving import Found, Moving, Reach, Source
from ..recorded import member_of
from .declaring import permissions_explained
from .delays import Delays
from .elsewhere import (
    CelerysLevels,
    Way,
    celerys_levels,
    read_celerys,
    sets_of,
    way_of_binding,
    ways_of,
)
from .entry import Entry
from .management import ManagementAPI, management_of
from .sources import QueueSource, SetSource
from .topology import Topology


class RabbitMQMovingPart:
    """RabbitMQ's :class:`~celery_native_delay.transports.moving.MovingPart`, on one channel."""

    def __init__(self, channel: Any, settings: DelaySettings) -> None:
        self._channel = channel
        self._delays: Delays = channel.delays
        self._settings = settings
        self._topology = self._delays.topology
        self.name: str = self._topology.name

    # --- into our levels -----------------------------------------------------------------

    def prepare(self, queues: Sequence[Any]) -> None:
        """Make sure of the levels, and bind *queues* to them."""
        with permissions_explained(self._topology):
            for queue in queues:
                queue(self._channel).declare()
            self._delays.prepare(consuming=True)

    def key_records(self) -> KeyRecords | None:
        try:
            return KeyRecords(self._channel.records(self._settings))
        except UnsupportedBroker:
            return None

    def take_in(self, moving: Moving, keyed: KeyedPublish | None = None) -> bool:
        """Put a message into the levels, confirmed; then note it, as a sign that it is there."""
        member = member_of(moving.headers, moving.delayed.delivery_id)
        if moving.again and not moving.known and self._is_in_records(moving, member):
            return True
        message = amqp.Message(moving.body, **moving.properties)
        self._delays.check_reach(moving.delayed.due_us)
        try:
            if keyed is not None:
                self._delays.put_in_keyed(keyed, message, moving.delayed)
                return not moving.again or keyed.due_us is None
            self._delays.put_back(message, moving.delayed, recorded=False)
        except NotFound as exc:
            raise CannotDelay(f"there is no exchange {moving.delayed.exchange!r}") from exc
        except MessageNacked as exc:
            raise CannotDelay(str(exc)) from exc
        self._record(moving, member)
        return not moving.again

    def _record(self, moving: Moving, member: str | None) -> None:
        recorder, delayed = self._delays.recorder, moving.delayed
        is_over = delayed.cancelled or delayed.due_us <= time_ns() // 1000
        if recorder is None or member is None or moving.known or is_over:
            return
        where = delayed.exchange, delayed.routing_key, delayed.queue
        entry = Entry(moving.properties, moving.body, *where, delayed.expires_ms)
        recorder.note(member, delayed.due_us, entry)

    def _is_in_records(self, moving: Moving, member: str | None) -> bool:
        records = self._delays.records
        if records is None or member is None:
            return False
        with suppress(RecordsUnavailable):
            return bool(records.state_of(member) is MessageState.KNOWN)
        return False

    # --- out of anything -----------------------------------------------------------------

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
        own = ways_of(reaches)
        found = [CelerysLevels(prefix)]
        if not prefix:
            with suppress(ManagementUnavailable):
                found = celerys_levels(self._api.names("queues", containing="celery_delayed_"))
        return [self._celerys_source(levels, own) for levels in found]

    def _celerys_source(self, levels: CelerysLevels, own: Sequence[Way]) -> Source:
        numbers = {levels.level(number): number for number in range(len(levels.queues))}
        ways = [own, self._ways_behind(levels)]

        def read(*message: Any, queue: str, now_us: int) -> Found:
            return read_celerys(*message, level=numbers[queue], now_us=now_us, ways=ways)

        return QueueSource(self._delays, levels.name, levels.queues, read)

    def _ways_behind(self, levels: CelerysLevels) -> list[Way]:
        with suppress(ManagementUnavailable):
            return [
                way_of_binding(each["destination"], each["routing_key"])
                for each in self._api.bindings_from(levels.delivery_exchange)
                if each["destination_type"] == "exchange"
            ]
        return []

    def _sets(self, name: str, *, here: bool) -> list[Source]:
        """Sets of a namespace, "" for this app's, or one that is named whole.

        Those that are *here* are moved into this part's own, which is none of them then.
        """
        wanted = name or self._settings.namespace
        try:
            names = self._api.names("queues", containing="level-")
        except ManagementUnavailable as exc:
            # What is named whole need not be looked for.
            names = [wanted] if here or name else [self.name]
            if not sets_of(names, self._settings):
                raise ManagementUnavailable(
                    f"earlier sets cannot be looked for: {exc}; or name one whole, such as "
                    f"--from sets:{self.name}"
                ) from exc
        found = [
            topology
            for topology in map(Topology, sets_of(names, self._settings))
            if wanted in (topology.name, topology.settings.namespace)
            and not (here and topology.name == self.name)
        ]
        return [SetSource(self._delays, topology, self._settings, here=here) for topology in found]

    @property
    def _api(self) -> ManagementAPI:
        return management_of(self._delays.connection.client, self._settings)

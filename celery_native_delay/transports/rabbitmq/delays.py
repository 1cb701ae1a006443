"""Delayed publishing on one connection: make sure of the levels, wrap, send, confirm."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from secrets import token_hex
from struct import error as struct_error
from threading import local
from time import time_ns
from typing import Any

import amqp
from amqp.exceptions import (
    AccessRefused,
    FrameSyntaxError,
    MessageNacked,
    NotFound,
)

from ...due_time import check_reach, eta_of, units_until
from ...errors import CannotDelay, NativeDelayError, TopologyMismatch
from ...keyed.publishing import KeyedPublish
from ...message import Delayed
from ...records.interface import IndexEntry
from ...settings import DelaySettings
from ..moving import expires_ms_of
from ..recorded import records_beside
from .address import landing_address
from .channels import OwnChannel, Publication, WindowChannel
from .declaring import Declarer, broker_version, not_declared, not_permitted
from .entry import Entry
from .mirror import Mirror
from .preparation import Preparation, Prepared
from .recording import Recorder
from .routes import Routes
from .topology import Topology
from .wrapping import COUNTED_BY_THE_QUEUE, wrap

#: The headers dict and delivery id of a publish that failed in this thread: kombu's retry passes
#: the very same dict, and a resent message must keep its id.
_failed = local()

#: After these the broker has surely not got the message: refused, or impossible to write (a text
#: of more than 255 bytes where AMQP has no room for it).
_NOT_SENT = (MessageNacked, NotFound, FrameSyntaxError, NativeDelayError, struct_error)


class Delays:
    """Delayed delivery on one AMQP connection.

    It publishes; what it stands on knows nothing of it: *preparation* declares what must be there,
    by what *mirror* has seen of the user's bindings and *routes* of the user's exchanges.
    """

    def __init__(
        self, connection: Any, settings: DelaySettings, *, refusal: NativeDelayError | None = None
    ) -> None:
        """With a *refusal* every attempt to let a message wait raises it."""
        self.connection = connection
        self.settings = settings
        self.topology = Topology(settings)
        self.mirror = Mirror(self.topology)
        self.declarer = Declarer(connection, self.topology)
        self.routes = Routes(self.mirror, self.declarer)
        self.preparation = Preparation(self.mirror, self.routes, self.declarer, refusal=refusal)
        #: Ours for publishing, by whether they are in confirm mode.
        self._channels: dict[bool, OwnChannel] = {}
        self._in_batch = False
        #: Queues reached by their names, by the version of the mirror when all of it was there.
        self._seen_to: dict[str, int] = {}

    @property
    def user(self) -> str:
        """The broker user of this connection."""
        return str(self.connection.client.userid or "guest")

    @cached_property
    def records(self) -> Any:
        """The records beside this virtual host; None where none are kept."""
        return records_beside(self.settings, self.connection.virtual_host)

    @cached_property
    def recorder(self) -> Recorder | None:
        """None where no records are kept."""
        return None if self.records is None else Recorder(self.records)

    @cached_property
    def _limits_priority(self) -> bool:
        return (4,) <= broker_version(self.connection) < (4, 3)

    def prepare(self, *, redeclare: bool = False, consuming: bool = False) -> Prepared:
        return self.preparation.prepare(redeclare=redeclare, consuming=consuming)

    def units(self, due_us: int, *, now_us: int) -> int:
        """Units of the resolution to wait, 0 if it is due; raises DelayTooLong."""
        resolution_ms = self.topology.resolution_ms
        units = units_until(due_us, now_us=now_us, resolution_ms=resolution_ms)
        check_reach(units, max_units=self.topology.max_units, resolution_ms=resolution_ms)
        return units

    def check_reach(self, due_us: int) -> None:
        """Raise DelayTooLong for what is further away than the levels hold."""
        self.units(due_us, now_us=time_ns() // 1000)

    # --- publishing ----------------------------------------------------------------------

    def publish(
        self,
        publication: Publication,
        *,
        due_us: int,
        timeout_seconds: float | None = None,
        confirm_timeout_seconds: float | None = None,
    ) -> bool:
        """Send a message into the delay levels; False if it was due already, and was not sent.

        One that falls due meanwhile, or while the broker is away and kombu tries again, is sent
        where it is to go, and confirmed like all that wait.

        Raises:
            DelayTooLong, CannotDelay, NotPermitted, NotDeclared, TopologyMismatch,
                UnsupportedBroker: nothing was sent; the text says why and the way out.
            amqp.exceptions.NotFound: there is no such exchange.
            amqp.exceptions.MessageNacked: the broker did not accept it.
        """
        confirmed = self.settings.confirm_publish
        headers = publication.message.properties.get("application_headers")
        failed_headers, delivery_id = getattr(_failed, "publish", None) or (None, "")
        if failed_headers is not headers:
            if not self.units(due_us, now_us=time_ns() // 1000):
                return False
            delivery_id = token_hex(16)
        _failed.publish = (headers, delivery_id)
        sent = self.into_levels(publication, due_us=due_us, delivery_id=delivery_id)
        if sent is publication and not confirmed:
            return False
        try:
            self._send(
                sent,
                confirmed=confirmed,
                timeout_seconds=timeout_seconds,
                confirm_timeout_seconds=confirm_timeout_seconds,
            )
        except _NOT_SENT:
            if self.recorder is not None:
                self.recorder.forget(publication.message, delivery_id)
            raise
        _failed.publish = None
        return True

    def into_levels(
        self, publication: Publication, *, due_us: int, delivery_id: str | None = None
    ) -> Publication:
        """*publication* as it enters the delay levels, which are there then; itself if it is due.

        With a *delivery_id* it is sent again under the one that it had; else under a new one.
        Raises as :meth:`publish`, and as py-amqp does for a body that cannot be encoded.
        """
        if not self.units(due_us, now_us=time_ns() // 1000):
            return publication
        message, exchange, routing_key, _ = publication
        if isinstance(message.body, str):
            # As py-amqp would: a text that is sent again would get another encoding, or none.
            encoding = message.properties.setdefault("content_encoding", "utf-8")
            message = amqp.Message(message.body.encode(encoding), **message.properties)
        is_seen_to = not exchange and self._seen_to.get(routing_key) == self.mirror.version
        if not (is_seen_to and self.preparation.is_ready):
            self._see_to(exchange, routing_key)
        lands = exchange != "" and self.routes.lands(exchange, routing_key)
        # Only now: declaring may have taken a second.
        now_us = time_ns() // 1000
        units = self.units(due_us, now_us=now_us)
        if not units:
            return publication
        delayed = Delayed(delivery_id or token_hex(16), due_us, exchange, routing_key)
        return self._entering(message, delayed, now_us=now_us, units=units, lands=lands)

    def _see_to(self, exchange: str, routing_key: str) -> None:
        """Declare what a message needs on its way to this destination."""
        if not exchange:  # the queue is reached by its name, wherever it was declared
            self.mirror.queue_bound_once(routing_key)
        if not self.preparation.is_ready or self.mirror.is_pending:
            self.preparation.prepare()
        if not exchange and not self.mirror.is_pending:
            self._seen_to[routing_key] = self.mirror.version

    def publish_keyed(
        self, keyed: KeyedPublish, message: amqp.Message, exchange: str, routing_key: str
    ) -> None:
        """Send a message as its key has it, always confirmed; raises as :meth:`publish`.

        RecordsUnavailable, AnotherStands: what was sent, if anything, is void.
        """
        properties, body = message.properties, message.body
        if isinstance(body, str):
            body = body.encode(properties.setdefault("content_encoding", "utf-8"))
        like = Delayed("", 0, exchange, routing_key)
        self.put_in_keyed(keyed, amqp.Message(body, **properties), like)

    def put_in_keyed(self, keyed: KeyedPublish, message: amqp.Message, like: Delayed) -> None:
        """:meth:`publish_keyed` to where *like* says; *message* has its body in bytes."""
        properties, body = message.properties, message.body
        headers = properties.get("application_headers") or {}

        def put(due_us: int, delivery_id: str, clock_ahead_us: int) -> IndexEntry:
            now_us = time_ns() // 1000 - clock_ahead_us
            self.units(due_us, now_us=now_us)  # or DelayTooLong
            own = {**properties, "application_headers": {**headers, "eta": eta_of(due_us)}}
            expires_ms = like.expires_ms or expires_ms_of(own, now_us=now_us)
            where = like.exchange, like.routing_key, like.queue, expires_ms
            delayed = Delayed(delivery_id, due_us, *where)
            message = amqp.Message(body, **own)
            self.put_back(message, delayed, recorded=False, clock_ahead_us=clock_ahead_us)
            member = f"{keyed.task_id}:{delivery_id}"
            return IndexEntry(member, due_us, Entry(own, body, *where).encoded())

        keyed.settle(self.records, put)

    # --- putting back --------------------------------------------------------------------

    def put_back(
        self,
        message: amqp.Message,
        delayed: Delayed,
        *,
        recorded: bool = True,
        clock_ahead_us: int = 0,
    ) -> None:
        """Let a message that was received wait (again), as *delayed* says, then deliver it.

        One that is further away than the levels reach is delivered when their longest delay is
        over: a worker that gets it puts it back. Its body is in the bytes that came. *recorded*:
        the records are told of it. *clock_ahead_us* is how far our clock is ahead of the clock by
        which the due time is told.
        """
        exchange, routing_key, queue = delayed.exchange, delayed.routing_key, delayed.queue
        if queue is not None or not exchange:
            self.mirror.queue_bound_once(routing_key if queue is None else queue)
        self.preparation.prepare()
        lands = queue is None and exchange != "" and self.routes.lands(exchange, routing_key)
        now_us = time_ns() // 1000 - clock_ahead_us
        units = units_until(
            delayed.due_us, now_us=now_us, resolution_ms=self.topology.resolution_ms
        )
        units = min(max(units, 1), self.topology.max_units)
        headers = message.properties.get("application_headers") or {}
        own = {name: headers[name] for name in headers if name not in COUNTED_BY_THE_QUEUE}
        message = amqp.Message(message.body, **{**message.properties, "application_headers": own})
        publication = self._entering(
            message,
            delayed,
            now_us=now_us,
            units=units,
            lands=lands,
            user=self.user,
            recorded=recorded,
        )
        self._send(publication, confirmed=True)

    @contextmanager
    def one_confirm(self) -> Iterator[None]:
        """:meth:`put_back` inside does not wait for each confirm; leaving waits for all of them.

        Raises:
            amqp.exceptions.AMQPError: some are not confirmed; which ones is not known.
        """
        channel = self._channel(confirmed=True)
        self._in_batch = True
        try:
            yield
            channel.wait_all()
            # Another channel, if the first was closed underway.
            self._settle(self._channel(confirmed=True))
        finally:
            self._in_batch = False

    def _entering(
        self,
        message: amqp.Message,
        delayed: Delayed,
        *,
        now_us: int,
        units: int,
        lands: bool,
        user: str | None = None,
        recorded: bool = True,
    ) -> Publication:
        """*message* as it enters the levels, wrapped, and noted in the records if it is *recorded*.

        One that *lands* keeps its own routing key, beside which ours travels as BCC.
        """
        topology = self.topology
        properties = wrap(
            message.properties,
            delayed,
            now_us=now_us,
            limit_priority=self._limits_priority,
            user=user,
        )
        first_ttl_ms = topology.first_ttl_ms(units, remaining_us=delayed.due_us - now_us)
        if first_ttl_ms is not None:
            properties["expiration"] = str(first_ttl_ms)
        exchange, routing_key = delayed.exchange, delayed.routing_key
        if delayed.queue is not None:
            exchange, routing_key = "", delayed.queue
        if lands:
            if topology.collides(routing_key):
                raise CannotDelay(
                    f"a delayed message to exchange {exchange!r}, which needs a landing queue, "
                    f"cannot have the routing key {routing_key!r}: its first "
                    f"{topology.bit_count} words read like a delay; use other words"
                )
            ours = topology.routing_key(units, landing_address(exchange))
            properties["application_headers"]["BCC"] = [ours]
            key = routing_key
        else:
            key = topology.routing_key(units, topology.address(exchange, routing_key))
        wrapped = amqp.Message(message.body, **properties)
        if recorded and self.recorder is not None:
            self.recorder.record(message, wrapped, delayed)
        return Publication(wrapped, topology.entry_exchange(units), key)

    def _channel(self, *, confirmed: bool) -> OwnChannel:
        channel = self._channels.get(confirmed)
        if channel is None or channel.connection is None:
            kind = WindowChannel if confirmed else OwnChannel
            channel = self._channels[confirmed] = kind(self.connection)
        return channel

    def _send(
        self,
        publication: Publication,
        *,
        confirmed: bool,
        timeout_seconds: float | None = None,
        confirm_timeout_seconds: float | None = None,
    ) -> None:
        for last_try in (False, True):
            try:
                channel = self._channel(confirmed=confirmed)
                channel.send(publication, timeout_seconds=timeout_seconds)
                if not self._in_batch:
                    self._settle(channel, confirm_timeout_seconds or timeout_seconds)
                return
            except (AccessRefused, NotFound) as exc:
                if not publication.mandatory:  # it goes to an exchange of the user's
                    raise
                if isinstance(exc, AccessRefused):
                    raise not_permitted(exc, self.topology) from exc
                if not self.settings.declare:
                    raise not_declared(exc.reply_text) from exc
                if last_try:
                    raise
                # The broker lost the levels while this connection lived.
                self.preparation.declare_again()

    def _settle(self, channel: OwnChannel, timeout_seconds: float | None = None) -> None:
        """Wait for confirms; send again what came back because its level queue was deleted."""
        channel.wait_all(timeout_seconds=timeout_seconds)
        returned = channel.take_returned()
        if not returned:
            return
        if not self.settings.declare:
            raise not_declared(f"{returned[0].exchange} leads nowhere")
        self.preparation.declare_again()
        for back in returned:
            channel.send(back)
        channel.wait_all()
        if channel.take_returned():
            raise TopologyMismatch(
                f"{returned[0].exchange} leads nowhere although it was declared: see "
                f"`celery -A PROJ delay verify`"
            )

"""Delayed publishing on one connection: make sure of the levels, seal, send, confirm."""

from __future__ import annotations

from collections.abc import Callable, Iterator
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
    RecoverableConnectionError,
)

from ...due_time import check_reach, units_until
from ...errors import CannotDelay, NativeDelayError, TopologyMismatch
from ...message import Delayed
from ...settings import DelaySettings
from .address import landing_address, message_address
from .declaring import broker_version, not_permitted
from .encoded import encoded
from .envelope import COUNTED_BY_THE_QUEUE, seal
from .outbox import Outbox, outbox_key, outbox_of
from .own_channel import OwnChannel
from .preparation import Preparation
from .recording import Recorder
from .window import Publication

#: The headers dict and delivery id of a publish that failed in this thread: kombu's retry passes
#: the very same dict, and a resent message must keep its id.
_failed = local()


#: After these the broker has surely not got the message: refused, or impossible to write (a text
#: of more than 255 bytes where AMQP has no room for it).
_NOT_SENT = (MessageNacked, NotFound, FrameSyntaxError, NativeDelayError, struct_error)


class Delays(Preparation):
    """Everything delayed delivery does on one AMQP connection."""

    def __init__(
        self, connection: Any, settings: DelaySettings, *, refusal: NativeDelayError | None = None
    ) -> None:
        super().__init__(connection, settings, refusal=refusal)
        self._publisher: OwnChannel | None = None
        self._confirmer: OwnChannel | None = None
        self._in_batch = False
        self._outbox_connects = 0
        self.recorder = Recorder(self)

    @property
    def publisher(self) -> OwnChannel:
        """Our channel for publishing as the settings say; a new one when the broker closed it."""
        if self.settings.confirm_publish == "wait":
            return self.confirmer
        if self._publisher is None or self._publisher.connection is None:
            self._publisher = OwnChannel(self.connection, confirm=False)
        return self._publisher

    @property
    def confirmer(self) -> OwnChannel:
        """Our channel in confirm mode: for what is acknowledged elsewhere once it has arrived."""
        if self._confirmer is None or self._confirmer.connection is None:
            self._confirmer = OwnChannel(self.connection)
        return self._confirmer

    @property
    def outbox(self) -> Outbox:
        """What keeps the delayed messages of this process until they are confirmed."""
        client = self.connection.client
        if client is None:
            raise RecoverableConnectionError("connection already closed")
        return outbox_of(self._outbox_key, client, self.settings)

    @cached_property
    def _outbox_key(self) -> Any:
        return outbox_key(self.connection.client, self.settings)

    @property
    def user(self) -> str:
        """The broker user of this connection."""
        return str(self.connection.client.userid or "guest")

    @cached_property
    def _limits_priority(self) -> bool:
        return (4,) <= broker_version(self.connection) < (4, 3)

    def publish(
        self,
        message: amqp.Message,
        exchange: str,
        routing_key: str,
        *,
        due_us: int,
        publish_now: Callable[[], Any],
        timeout_seconds: float | None = None,
        confirm_timeout_seconds: float | None = None,
    ) -> Any:
        """Send a message into the delay levels, or call *publish_now* when it is due already.

        Raises:
            DelayTooLong, CannotDelay, NotPermitted, TopologyMismatch, UnsupportedBroker: nothing
                was sent; the text says why and the way out.
            amqp.exceptions.NotFound: there is no such exchange.
            amqp.exceptions.MessageNacked: the broker did not accept it.
            PublishRefused: it did not accept earlier ones, with "window"; nothing was sent.
        """
        if self.settings.confirm_publish == "window":
            self._follow_outbox()
        publication = self.publication(message, exchange, routing_key, due_us=due_us)
        if publication is None:
            return publish_now()
        _failed.publish = (message.properties.get("application_headers"), publication.id)
        try:
            if self.settings.confirm_publish == "window":
                self.outbox.publish(
                    publication, timeout_seconds=confirm_timeout_seconds or timeout_seconds
                )
            else:
                self._send(
                    publication,
                    confirmed=self.settings.confirm_publish == "wait",
                    timeout_seconds=timeout_seconds,
                    confirm_timeout_seconds=confirm_timeout_seconds,
                )
        except _NOT_SENT:
            self.recorder.forget(message, str(publication.id))
            raise
        _failed.publish = None
        return None

    def publication(
        self, message: amqp.Message, exchange: str, routing_key: str, *, due_us: int
    ) -> Publication | None:
        """*message* as it enters the delay levels, which are there then; None if it is due.

        Raises:
            DelayTooLong, CannotDelay, NotPermitted, TopologyMismatch, UnsupportedBroker,
            amqp.exceptions.NotFound: as :meth:`publish`.
        """
        if not self.is_ahead(due_us, now_us=time_ns() // 1000):
            return None
        message = encoded(message)
        if not exchange:
            # Reached by its name, whoever declared it.
            self.mirror.queue_bound_once(routing_key)
        if not self.is_prepared:
            self.prepare()
        lands = self._routes.lands(exchange, routing_key)
        # Only now: declaring may have taken a second.
        now_us = time_ns() // 1000
        units = self.units(due_us, now_us)
        if not units:
            return None
        delivery_id = self._delivery_id(message.properties.get("application_headers"))
        delayed = Delayed(delivery_id, due_us, exchange, routing_key)
        sealed = self._sealed(message, delayed, now_us=now_us, units=units)
        routed = self._routed(sealed, units, exchange, routing_key, lands=lands)
        self.recorder.record(message, sealed, delayed)
        return routed

    def _follow_outbox(self) -> None:
        """The outbox had to connect again: what this connection relies on may be gone too.

        Raises:
            OSError, amqp.exceptions.AMQPError: this connection is.
        """
        connects, self._outbox_connects = self._outbox_connects, self.outbox.connects
        if connects and connects != self._outbox_connects:
            self.look_again()

    def put_back(self, message: amqp.Message, delayed: Delayed, *, recorded: bool = True) -> None:
        """Let a message that was received wait (again), then deliver it.

        Args:
            message: as received, its body in the bytes that came.
            delayed: the wait it is to have; due in the past, it is delivered at once.
            recorded: the ledger is told of it.
        """
        exchange, routing_key, queue = delayed.exchange, delayed.routing_key, delayed.queue
        if queue is not None or not exchange:
            self.mirror.queue_bound_once(routing_key if queue is None else queue)
        self.prepare()
        lands = queue is None and self._routes.lands(exchange, routing_key)
        now_us = time_ns() // 1000
        units = max(self.units(delayed.due_us, now_us), 1)
        headers = message.properties.get("application_headers") or {}
        own = {name: headers[name] for name in headers if name not in COUNTED_BY_THE_QUEUE}
        message = amqp.Message(message.body, **{**message.properties, "application_headers": own})
        sealed = self._sealed(message, delayed, now_us=now_us, units=units, user=self.user)
        if recorded:
            self.recorder.record(message, sealed, delayed)
        to = (exchange, routing_key) if queue is None else ("", queue)
        self._send(self._routed(sealed, units, *to, lands=lands), confirmed=True)

    @contextmanager
    def one_confirm(self) -> Iterator[None]:
        """:meth:`put_back` inside does not wait for each confirm; leaving waits for all of them.

        Raises:
            amqp.exceptions.AMQPError: some are not confirmed; which, nobody knows.
        """
        self._in_batch = True
        confirmer = self.confirmer
        try:
            yield
            confirmer.wait_all()
            # Another channel, if the first was closed underway.
            self.confirmer.wait_all()
            self._resend_returned(self.confirmer)
        finally:
            self._in_batch = False

    def _sealed(
        self,
        message: amqp.Message,
        delayed: Delayed,
        *,
        now_us: int,
        units: int,
        user: str | None = None,
    ) -> amqp.Message:
        limits = self._limits_priority
        properties = seal(
            message.properties, delayed, now_us=now_us, limit_priority=limits, user=user
        )
        first_ttl_ms = self.topology.first_ttl_ms(units, remaining_us=delayed.due_us - now_us)
        if first_ttl_ms is not None:
            properties["expiration"] = str(first_ttl_ms)
        return amqp.Message(message.body, **properties)

    def is_ahead(self, due_us: int, *, now_us: int) -> bool:
        """Whether there is anything to wait for.

        Raises:
            DelayTooLong: more than the levels hold.
        """
        return self.units(due_us, now_us) > 0

    def units(self, due_us: int, now_us: int) -> int:
        """Units of the resolution to wait.

        Raises:
            DelayTooLong: more than the levels hold.
        """
        resolution_ms = self.topology.resolution_ms
        units = units_until(due_us, now_us=now_us, resolution_ms=resolution_ms)
        check_reach(units, max_units=self.topology.max_units, resolution_ms=resolution_ms)
        return units

    @staticmethod
    def _delivery_id(headers: Any) -> str:
        failed = getattr(_failed, "publish", None)
        if failed and headers is not None and failed[0] is headers:
            return str(failed[1])
        return token_hex(16)

    def _routed(
        self, sealed: amqp.Message, units: int, exchange: str, routing_key: str, *, lands: bool
    ) -> Publication:
        key = self._route(sealed, units, exchange, routing_key, lands=lands)
        return Publication(sealed, self.topology.entry_exchange(units), key)

    def _route(
        self, sealed: amqp.Message, units: int, exchange: str, routing_key: str, *, lands: bool
    ) -> str:
        """The routing key to publish with; for a landing queue ours travels as BCC beside it."""
        topology = self.topology
        if not lands:
            address = message_address(exchange, routing_key)
            return topology.routing_key(
                units, topology.address_or_hash(address, exchange, routing_key)
            )
        if topology.collides(routing_key):
            raise CannotDelay(
                f"a delayed message to exchange {exchange!r}, which needs a landing queue, cannot "
                f"have the routing key {routing_key!r}: its first {topology.bit_count} words "
                f"read like a delay; use other words"
            )
        headers = sealed.properties["application_headers"]
        headers["BCC"] = [topology.routing_key(units, landing_address(exchange))]
        return routing_key

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
                channel = self.confirmer if confirmed else self.publisher
                tag = channel.publish(*publication, timeout_seconds=timeout_seconds)
                if not self._in_batch:
                    if confirmed:
                        channel.wait_confirmed(
                            tag, timeout_seconds=confirm_timeout_seconds or timeout_seconds
                        )
                    self._resend_returned(channel)
                return
            except AccessRefused as exc:
                raise not_permitted(exc, self.topology) from exc
            except NotFound:
                if last_try:
                    raise
                # The broker lost the levels while this connection lived.
                self.declare_again()

    def _resend_returned(self, channel: OwnChannel) -> None:
        """Messages come back when somebody deleted the queue they were to wait in.

        Raises:
            TopologyMismatch: they come back again.
        """
        returned = channel.take_returned()
        if not returned:
            return
        self.declare_again()
        for back in returned:
            channel.publish(back.message, back.exchange, back.routing_key, mandatory=True)
        channel.wait_all()
        if channel.take_returned():
            raise TopologyMismatch(
                f"{returned[0].exchange} leads nowhere although it was declared: see "
                f"`celery -A PROJ delay verify`"
            )

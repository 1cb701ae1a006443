"""Publish delayed messages to RabbitMQ, and wait for publisher confirms."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cached_property
from secrets import token_hex
from time import time_ns
from typing import Any

import amqp
from amqp.exceptions import (
    AccessRefused,
    ChannelError,
    NotFound,
    RecoverableConnectionError,
)

from ...due_time import check_due, units_until
from ...errors import CannotDelay, NativeDelayError, PublishRefused, TopologyMismatch
from ...message import Delayed
from ...settings import DelaySettings
from ...store.interface import Store
from ...store.opened import store_of
from .address import landing_address
from .channels import CONFIRM_SECONDS, Publication, WindowChannel, in_bytes
from .declaring import Declarer, broker_version, not_declared, not_permitted
from .delivering import Deliverer, NoRoute
from .mirror import Mirror, remember
from .preparation import Preparation, Prepared
from .routes import Routes
from .topology import Topology
from .wrapping import COUNTED_BY_THE_QUEUE, wrap

#: Where the properties of one call of ``Producer.publish`` keep the delivery id until its confirm.
#: kombu's retry makes another message of the same dict, and this must keep the delivery id.
_DELIVERY_ID = "native_delay_id"


class RabbitDelays:
    """Publishes delayed messages on one AMQP connection."""

    def __init__(
        self, connection: Any, settings: DelaySettings, *, refusal: NativeDelayError | None = None
    ) -> None:
        """If *refusal* is an error, every publish of a delayed message raises *refusal*."""
        self.connection = connection
        self.settings = settings
        self._refusal = refusal
        self._longest_delay_seconds = settings.longest_delay_seconds
        self.topology = Topology(settings)
        self.declarer = Declarer(connection, self.topology)
        self.mirror = Mirror(self.topology, self.declarer.can_name)
        self.routes = Routes(self.mirror, self.declarer)
        self.preparation = Preparation(self.mirror, self.routes, self.declarer, refusal=refusal)
        self._channel: WindowChannel | None = None
        self._deliverer = Deliverer(connection)
        #: Queues that are bound by their names. Each value is the mirror's version at that time.
        self._declared_queues: dict[str, int] = {}

    @cached_property
    def store(self) -> Store | None:
        """Return this virtual host's store in ``native_delay_store``; None if not set."""
        if self._refusal is not None:
            raise self._refusal
        if self.settings.store is None:
            return None
        return store_of(self.settings, self.place)

    @property
    def place(self) -> str:
        """The virtual host, which tells this broker from others of the same namespace."""
        return str(self.connection.virtual_host)

    @cached_property
    def _limits_priority(self) -> bool:
        return (4,) <= broker_version(self.connection) < (4, 3)

    def prepare(self, *, redeclare: bool = False, consuming: bool = False) -> Prepared:
        return self.preparation.prepare(redeclare=redeclare, consuming=consuming)

    def units(self, due_us: int, *, now_us: int) -> int:
        """Return the remaining delay in units of 125 ms, or 0 if due."""
        check_due(due_us, now_us=now_us, longest_delay_seconds=self._longest_delay_seconds)
        return units_until(due_us, now_us=now_us, resolution_ms=self.topology.resolution_ms)

    def check_reach(self, due_us: int) -> None:
        """Raise DelayTooLong if *due_us* is too far in the future."""
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
        """Publish a delayed message; return False, without publishing, if the message is due."""
        limit_seconds = timeout_seconds or CONFIRM_SECONDS
        call = getattr(publication.message, "publish_call", publication.message.properties)
        if _DELIVERY_ID not in call and not self.units(due_us, now_us=time_ns() // 1000):
            return False
        delivery_id = call.setdefault(_DELIVERY_ID, token_hex(16))
        with self._answers_within(limit_seconds):
            waiting = self.into_levels(publication, due_us=due_us, delivery_id=delivery_id)
        self._send(
            waiting or publication,  # which became due since the first attempt
            timeout_seconds=limit_seconds,
            confirm_timeout_seconds=confirm_timeout_seconds or limit_seconds,
        )
        del call[_DELIVERY_ID]
        return True

    @contextmanager
    def _answers_within(self, seconds: float) -> Iterator[None]:
        """Give the broker *seconds* for each answer, then take the connection for lost.

        During an alarm, RabbitMQ answers nothing on a connection that has published.
        """
        transport = self.connection.transport
        sock, earlier = transport.sock, transport.sock.gettimeout()
        sock.settimeout(seconds)
        try:
            yield
        except TimeoutError as exc:
            transport.connected = False
            raise RecoverableConnectionError(f"no answer within {seconds:g} s") from exc
        finally:
            with suppress(OSError):  # it may be closed
                sock.settimeout(earlier)

    def into_levels(
        self, publication: Publication, *, due_us: int, delivery_id: str | None = None
    ) -> Publication | None:
        """Return the message with a delay queue as destination; None if it is due.

        Declares what the message needs on its way.
        """
        if not self.units(due_us, now_us=time_ns() // 1000):
            return None
        message, exchange, routing_key, _ = publication
        delayed = Delayed(delivery_id or token_hex(16), due_us, exchange, routing_key)
        return self._wrapped(in_bytes(message), delayed)

    def _declare_for(self, exchange: str, routing_key: str) -> None:
        version = self._declared_queues.get(routing_key)
        if not exchange and version == self.mirror.version and self.preparation.is_ready:
            return
        if not exchange:  # the routing key is the name of a queue
            self.declarer.check_name(routing_key)
            self.mirror.queue_bound_once(routing_key)
        if not self.preparation.is_ready or self.mirror.is_pending:
            self.preparation.prepare()
        if not exchange and not self.mirror.is_pending:
            remember(self._declared_queues, routing_key, self.mirror.version)

    # --- putting back --------------------------------------------------------------------

    def put_back(self, received: Sequence[tuple[amqp.Message, Delayed]]) -> list[Exception | None]:
        """Publish received messages again, so that each waits until its due time.

        Returns None for each message that waits, or the error. A NativeDelayError repeats if the
        publish is tried again.
        """
        outcomes: dict[int, Exception | None] = {}
        lost: Exception | None = None
        try:
            publications: dict[int, Publication] = {}
            for at, (message, delayed) in enumerate(received):
                try:
                    publications[at] = self._again(message, delayed)
                except (NativeDelayError, NotFound) as exc:
                    outcomes[at] = exc
            self._deliverer.deliver(publications, outcomes)
            astray = {
                at: publication
                for at, publication in publications.items()
                if isinstance(outcomes[at], (NoRoute, NotFound))
            }
            if astray and self.settings.declare:
                for at in astray:
                    del outcomes[at]
                self.preparation.declare_again()
                self._deliverer.deliver(astray, outcomes)
        except Exception as exc:  # the connection
            lost = exc
        return [self._explained(outcomes.get(at, lost)) for at in range(len(received))]

    def _again(self, message: amqp.Message, delayed: Delayed) -> Publication:
        headers = message.properties.get("application_headers") or {}
        own = {name: headers[name] for name in headers if name not in COUNTED_BY_THE_QUEUE}
        message = amqp.Message(message.body, **{**message.properties, "application_headers": own})
        publication = self._wrapped(message, delayed, user=self.declarer.user)
        assert publication is not None
        return publication

    def _explained(self, error: Exception | None) -> Exception | None:
        if isinstance(error, AccessRefused):
            return not_permitted(error, self.topology)
        if isinstance(error, ChannelError):
            return PublishRefused(f"RabbitMQ does not take the message: {error.reply_text}")
        return error

    def _wrapped(
        self, message: amqp.Message, delayed: Delayed, *, user: str | None = None
    ) -> Publication | None:
        """Add this package's header, routing key and expiration to a delayed message.

        Returns None if the message is due. If *user* puts the message back, it waits anyway.
        """
        topology = self.topology
        exchange, routing_key = delayed.exchange, delayed.routing_key
        if delayed.queue is not None:
            exchange, routing_key = "", delayed.queue
        self._declare_for(exchange, routing_key)
        landing = self.routes.prepare(exchange, routing_key)
        # The delay is computed after declaring, because declaring may take a second.
        now_us = time_ns() // 1000
        units = units_until(delayed.due_us, now_us=now_us, resolution_ms=topology.resolution_ms)
        if not units and user is None:
            return None
        units = min(max(units, 1), topology.max_units)
        properties = wrap(
            message.properties,
            delayed,
            now_us=now_us,
            limit_priority=self._limits_priority,
            user=user,
        )
        # put_back() accepts due times beyond the longest delay. The message then returns early, and
        # the worker puts it back again.
        remaining_us = min(delayed.due_us - now_us, units * topology.resolution_ms * 1000)
        properties["expiration"] = str(topology.first_ttl_ms(units, remaining_us=remaining_us))
        if landing:
            if topology.collides(routing_key):
                raise CannotDelay(
                    f"a delayed message to exchange {exchange!r}, which needs a landing queue, "
                    f"cannot have the routing key {routing_key!r}: its first "
                    f"{topology.bit_count} words read like a delay; use other words"
                )
            # An extra queue dead-letters the due message with the message's own routing key, so
            # this package's routing key is in the header BCC.
            ours = topology.routing_key(units, landing_address(exchange))
            properties["application_headers"]["BCC"] = [ours]
            key = routing_key
        else:
            key = topology.routing_key(units, topology.address(exchange, routing_key))
        wrapped = amqp.Message(message.body, **properties)
        return Publication(wrapped, topology.entry_exchange(units), key)

    def _send(
        self, publication: Publication, *, timeout_seconds: float, confirm_timeout_seconds: float
    ) -> None:
        for last_try in (False, True):
            try:
                if self._channel is None or self._channel.connection is None:
                    self._channel = WindowChannel(self.connection)
                self._channel.send(publication, timeout_seconds=timeout_seconds)
                self._settle(self._channel, confirm_timeout_seconds)
                return
            except (AccessRefused, NotFound) as exc:
                if not publication.mandatory:  # it goes to the user's own exchange
                    raise
                if isinstance(exc, AccessRefused):
                    raise not_permitted(exc, self.topology) from exc
                if not self.settings.declare:
                    raise not_declared(exc.reply_text) from exc
                if last_try:
                    raise
                # The levels were deleted while this connection was open.
                self.preparation.declare_again()

    def _settle(self, channel: WindowChannel, timeout_seconds: float) -> None:
        """Wait for confirms; declare missing delay queues and publish returned messages again."""
        channel.wait_all(timeout_seconds=timeout_seconds)
        returned = channel.take_returned()
        if not returned:
            return
        if not self.settings.declare:
            raise not_declared(f"no queue is bound to {returned[0].exchange}")
        self.preparation.declare_again()
        for back in returned:
            channel.send(back)
        channel.wait_all(timeout_seconds=timeout_seconds)
        if channel.take_returned():
            raise TopologyMismatch(
                f"no queue is bound to {returned[0].exchange}, although it was declared: see "
                f"`celery -A PROJ delay doctor`"
            )

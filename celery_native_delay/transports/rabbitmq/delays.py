"""Delayed publishing on one connection: make sure of the levels, mirror, seal, send, confirm."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from threading import local
from time import monotonic, time_ns
from typing import Any
from uuid import uuid4

import amqp
from amqp.exceptions import AccessRefused, ChannelError, NotFound

from ...core.address import landing_address, message_address
from ...core.due_time import check_reach, units_until
from ...core.errors import CannotDelay, NativeDelayError, NotPermitted
from ...core.settings import DelaySettings
from ...core.topology import Exchange, Topology
from .declaring import (
    apply,
    broker_version,
    check_broker,
    permissions_explained,
    refusals_explained,
)
from .envelope import seal
from .mirror import Mirror, Mirrored, must_land_declarations
from .own_channel import OwnChannel
from .routes import Routes

logger = logging.getLogger(__name__)

#: The headers dict and delivery id of a publish that failed in this thread: kombu's retry passes
#: the very same dict, and a resent message must keep its id.
_failed = local()


@dataclass(frozen=True)
class Prepared:
    """What :meth:`Delays.prepare` did."""

    declared: bool
    mirrored: int
    seconds: float


class Delays:
    """Everything delayed delivery does on one AMQP connection.

    With a *refusal* nothing is delayed: whoever asks for it is told why.
    """

    def __init__(
        self, connection: Any, settings: DelaySettings, *, refusal: NativeDelayError | None = None
    ) -> None:
        self.connection = connection
        self._refusal = refusal
        self.settings = settings
        self.topology = Topology(settings)
        self.mirror = Mirror(self.topology)
        self._publisher: OwnChannel | None = None
        self._confirmer: OwnChannel | None = None
        self._declarer: OwnChannel | None = None
        self._ready = False
        self._routes = Routes(self.topology, self.mirror, lambda: self.declarer)
        self._in_batch = False
        self._told = False

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
    def declarer(self) -> OwnChannel:
        """Our channel for what the broker may refuse, which closes it; never the publisher."""
        if self._declarer is None or self._declarer.connection is None:
            self._declarer = OwnChannel(self.connection, confirm=False)
        return self._declarer

    @cached_property
    def _limits_priority(self) -> bool:
        return (4,) <= broker_version(self.connection) < (4, 3)

    # --- preparing -----------------------------------------------------------------------

    def prepare(self, *, redeclare: bool = False, consuming: bool = False) -> Prepared:
        """Make sure of the delay levels and of every mirrored binding; cached.

        Args:
            redeclare: declare the levels even where they seem complete.
            consuming: the queues declared here are about to be consumed from.

        Raises:
            UnsupportedBroker, NotPermitted, TopologyMismatch: saying the way out.
        """
        if self._refusal is not None:
            raise self._refusal
        started = monotonic()
        declared = False
        if redeclare or not self._ready:
            check_broker(self.connection)
            declared = redeclare or not self._is_complete()
            if declared:
                self.declare()
            self._ready = True
        mirrored = self._mirror_pending(consuming) if self.mirror.is_pending else 0
        return Prepared(declared, mirrored, monotonic() - started)

    def declare(self) -> None:
        """Declare the whole set, whether it is there or not."""
        with refusals_explained(self.topology):
            apply(self.declarer, self.topology.plan())

    def prepare_to_consume(self, queue: str) -> None:
        """Mirror what was declared for a consumer; never fails, consuming must go on."""
        if self.mirror.is_stranger(queue):
            # Declared by somebody else.
            self.mirror.queue_bound_once(queue)
        if not self.mirror.is_pending:
            return
        try:
            self.prepare(consuming=True)
        except (NativeDelayError, ChannelError) as exc:
            level = logging.DEBUG if self._told else logging.ERROR
            self._told = True
            logger.log(level, "native delay: delayed messages may park, nothing is bound: %s", exc)

    def _is_complete(self) -> bool:
        """Whether the last exchange of the plan is there.

        RabbitMQ 4.3 asks for the configure permission even here; who lacks it relies on
        somebody else's declaring, and a publish finds out.
        """
        try:
            self.declarer.exchange_declare(self.topology.ready_exchange, "fanout", passive=True)
        except NotFound:
            return False
        except AccessRefused:
            return True
        return True

    def _mirror_pending(self, consuming: bool) -> int:
        bindings, landings = self.mirror.take_pending()
        mirrored = [binding for binding in bindings if self._routes.exists(binding.exchange)]
        for queue in {
            binding.queue for binding in mirrored if self.mirror.is_stranger(binding.queue)
        }:
            self.mirror.arguments_seen(queue, rejects=self._routes.queue_lands(queue))
        groups = [list(must_land_declarations(self.topology, exchange)) for exchange in landings]
        if consuming:
            named = sorted({binding.exchange for binding in mirrored if binding.exchange})
            groups += [[Exchange(self.topology.mirrored_marker(name), "fanout")] for name in named]
        bound = [declaration for b in mirrored for declaration in self.mirror.declarations(b)]
        try:
            apply(self.declarer, [*chain.from_iterable(groups), *bound])
        except ChannelError:
            # One queue that is gone must not keep the others from being bound.
            for group in groups:
                with suppress(AccessRefused, NotFound):
                    apply(self.declarer, group)
            self._mirror_each(mirrored)
        self._routes.forget()
        return len(mirrored)

    def _mirror_each(self, bindings: list[Mirrored]) -> None:
        refused: dict[Mirrored, NotPermitted] = {}
        for binding in bindings:
            try:
                with refusals_explained(self.topology):
                    apply(self.declarer, self.mirror.declarations(binding))
            except NotPermitted as exc:
                refused[binding] = exc
            except ChannelError as exc:
                logger.debug("not mirrored: %s: %s", binding, exc)
        if refused:
            self.mirror.not_mirrored(list(refused))
            raise next(iter(refused.values()))

    def unmirror(self, binding: Mirrored) -> None:
        """Take back what mirrors a binding that the user has removed."""
        try:
            if not (self._is_complete() and self._routes.exists(binding.exchange)):
                return
            mirrored = self.mirror.binding_of(binding)
            if mirrored is not None:
                self.declarer.queue_unbind(
                    mirrored.destination, mirrored.source, mirrored.routing_key
                )
        except ChannelError as exc:
            logger.debug("not unbound: %s: %s", binding, exc)

    # --- publishing ----------------------------------------------------------------------

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
        """
        if not self._units(due_us, time_ns() // 1000):
            return publish_now()
        self.prepare()
        lands = self._routes.lands(exchange, routing_key)
        # Only now: declaring may have taken a second.
        now_us = time_ns() // 1000
        units = self._units(due_us, now_us)
        if not units:
            return publish_now()
        headers = message.properties.get("application_headers")
        delivery_id = self._delivery_id(headers)
        sealed = self._sealed(message, exchange, routing_key, due_us, now_us, delivery_id)
        key = self._route(sealed, units, exchange, routing_key, lands=lands)
        _failed.publish = (headers, delivery_id)
        self._send(
            sealed,
            units,
            key,
            confirmed=self.settings.confirm_publish == "wait",
            timeout_seconds=timeout_seconds,
            confirm_timeout_seconds=confirm_timeout_seconds,
        )
        _failed.publish = None
        return None

    def put_back(
        self,
        message: amqp.Message,
        exchange: str,
        routing_key: str,
        *,
        queue: str | None,
        due_us: int,
        delivery_id: str | None = None,
    ) -> None:
        """Let a message that was received wait (again), then deliver it.

        Args:
            message: as received, its body in the original encoding.
            exchange, routing_key: what it was once published with, and is seen with again.
            queue: the one queue it is for, or None for all that *exchange* leads to.
            due_us: microseconds since the epoch; a past one is delivered at once.
            delivery_id: the id it has had so far.
        """
        if queue is not None:
            self.mirror.queue_bound_once(queue)
        self.prepare()
        lands = queue is None and self._routes.lands(exchange, routing_key)
        now_us = time_ns() // 1000
        units = max(self._units(due_us, now_us), 1)
        delivery_id = delivery_id or uuid4().hex
        sealed = self._sealed(message, exchange, routing_key, due_us, now_us, delivery_id, queue)
        to = (exchange, routing_key) if queue is None else ("", queue)
        self._send(sealed, units, self._route(sealed, units, *to, lands=lands), confirmed=True)

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
        finally:
            self._in_batch = False

    def _sealed(
        self,
        message: amqp.Message,
        exchange: str,
        routing_key: str,
        due_us: int,
        now_us: int,
        delivery_id: str,
        queue: str | None = None,
    ) -> amqp.Message:
        properties = seal(
            message.properties,
            exchange=exchange,
            routing_key=routing_key,
            due_us=due_us,
            now_us=now_us,
            delivery_id=delivery_id,
            limit_priority=self._limits_priority,
            queue=queue,
        )
        return amqp.Message(message.body, **properties)

    def _units(self, due_us: int, now_us: int) -> int:
        resolution_ms = self.topology.resolution_ms
        units = units_until(due_us, now_us=now_us, resolution_ms=resolution_ms)
        check_reach(units, max_units=self.topology.max_units, resolution_ms=resolution_ms)
        return units

    @staticmethod
    def _delivery_id(headers: Any) -> str:
        failed = getattr(_failed, "publish", None)
        if failed and headers is not None and failed[0] is headers:
            return str(failed[1])
        return uuid4().hex

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
                f"have the routing key {routing_key!r}: its first {topology.digit_count} words "
                f"read like a delay; use other words"
            )
        headers = sealed.properties["application_headers"]
        headers["BCC"] = [topology.routing_key(units, landing_address(exchange))]
        return routing_key

    def _send(
        self,
        sealed: amqp.Message,
        units: int,
        routing_key: str,
        *,
        confirmed: bool,
        timeout_seconds: float | None = None,
        confirm_timeout_seconds: float | None = None,
    ) -> None:
        entry = self.topology.entry_exchange(units)
        for last_try in (False, True):
            try:
                with permissions_explained(self.topology):
                    channel = self.confirmer if confirmed else self.publisher
                    tag = channel.publish(
                        sealed, entry, routing_key, timeout_seconds=timeout_seconds
                    )
                    if confirmed and not self._in_batch:
                        channel.wait_confirmed(
                            tag, timeout_seconds=confirm_timeout_seconds or timeout_seconds
                        )
                return
            except NotFound:
                if last_try:
                    raise
                # The broker lost the levels while this connection lived.
                self.mirror.forget_mirrored()
                self._routes.forget()
                self.prepare(redeclare=True)

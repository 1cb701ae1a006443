"""Additional AMQP channels, so that an error does not close the user's channel."""

from __future__ import annotations

import logging
import select
from collections import Counter, OrderedDict
from collections.abc import Hashable, Sequence
from contextlib import suppress
from time import monotonic
from typing import Any, NamedTuple

import amqp
from amqp import spec
from amqp.exceptions import ChannelError, MessageNacked, RecoverableConnectionError, error_for_code

from ...errors import NotConfirmed, RefusedMessage
from ...message import HEADER

logger = logging.getLogger(__name__)

#: Seconds that a publish waits for RabbitMQ to take and confirm a delayed message.
CONFIRM_SECONDS = 30.0

NACKED = "the broker refused it (basic.nack)"


class Publication(NamedTuple):
    """A message with an exchange and a routing key, ready for ``basic.publish``."""

    message: amqp.Message
    exchange: str
    routing_key: str
    mandatory: bool = True

    @property
    def id(self) -> Hashable:
        message = self.message
        return id_of(self.exchange, self.routing_key, message.properties, message.body)

    def refused(self, reason: str) -> RefusedMessage:
        headers = dict(self.message.properties.get("application_headers") or {})
        header = headers.pop(HEADER, None)
        if header is None:
            to = (self.exchange, self.routing_key)
            return RefusedMessage(reason, *to, headers, self.message.body)
        headers.pop("BCC", None)
        to = (header["exchange"], header["rk"])
        return RefusedMessage(reason, *to, headers, self.message.body, header["id"])


def id_of(exchange: str, routing_key: str, properties: Any, body: bytes | str) -> Hashable:
    """Compute an id that is equal for a published message and its ``basic.return``."""
    header = (properties.get("application_headers") or {}).get(HEADER)
    known_by = header.get("id") if isinstance(header, dict) else None
    known_by = known_by or properties.get("correlation_id") or body
    return exchange, routing_key, known_by.encode() if isinstance(known_by, str) else known_by


def in_bytes(message: amqp.Message) -> amqp.Message:
    """Encode a message body of type str to bytes, as py-amqp does."""
    if not isinstance(message.body, str):
        return message
    encoding = message.properties.setdefault("content_encoding", "utf-8")
    return amqp.Message(message.body.encode(encoding), **message.properties)


def received(message: amqp.Message) -> amqp.Message:
    """If the body is None, replace None by empty bytes; return the same message."""
    message.body = message.body or b""
    return message


class OwnChannel(amqp.Channel):  # type: ignore[misc]
    """A second AMQP channel on the user's connection, without publisher confirms."""

    #: Reply code and text with which the broker closed this channel; None if it is open.
    closed_with: tuple[int, str] | None = None

    def __init__(self, connection: Any) -> None:
        super().__init__(connection, auto_decode=False)
        self._returned: list[Any] = []
        self.open()

    def send(self, publication: Publication) -> None:
        self._basic_publish(*publication)

    def take_returned(self) -> list[Any]:
        returned, self._returned = self._returned, []
        return returned

    # --- the socket ----------------------------------------------------------------------

    @property
    def _transport(self) -> Any:
        if self.connection is None or self.connection._transport is None:
            raise RecoverableConnectionError("connection already closed")
        return self.connection._transport

    def is_readable(self, timeout_seconds: float) -> bool:
        """Return True if data from the broker arrives within *timeout_seconds*."""
        transport = self._transport
        if transport.sock is None:
            raise RecoverableConnectionError("connection already closed")
        return bool(transport._read_buffer) or _has_input(transport.sock, timeout_seconds)

    def read(self) -> None:
        if self.connection is None:
            raise RecoverableConnectionError("connection already closed")
        try:
            with suppress(TimeoutError):  # the connection's own read_timeout
                self.connection.blocking_read()
        except ChannelError as exc:
            if self.closed_with is not None:
                raise
            # The error closed another channel of this connection. If this method raised the error,
            # the caller would send messages again that the broker is about to confirm.
            logger.error("channel error of an earlier operation: %s", exc)

    # --- what the broker says ------------------------------------------------------------

    def _on_basic_return(
        self, reply_code: int, reply_text: str, exchange: str, routing_key: str, message: Any
    ) -> None:
        self._returned.append(Publication(received(message), exchange, routing_key))

    def _on_close(self, reply_code: int, reply_text: str, class_id: int, method_id: int) -> None:
        """Keep the channel closed if the broker closes the channel.

        By default, py-amqp opens the channel again. For :class:`WindowChannel`, this would turn
        publisher confirms off.
        """
        self.closed_with = (reply_code, reply_text)
        self.send_method(spec.Channel.CloseOk)
        self.collect()
        raise error_for_code(reply_code, reply_text, (class_id, method_id), ChannelError)


class WindowChannel(OwnChannel):
    """A channel that keeps each published message until the broker confirms the message."""

    def __init__(self, connection: Any) -> None:
        super().__init__(connection)
        self._published = 0
        #: The unconfirmed messages, by delivery tag.
        self._unconfirmed: OrderedDict[int, Any] = OrderedDict()
        #: How often the broker returned each message. The message's confirm follows.
        self._returning: Counter[Hashable] = Counter()
        self._nacked: list[Any] = []
        self.confirm_select()

    @property
    def unsettled_count(self) -> int:
        """Count the published messages whose ack, nack or return is not yet processed."""
        return len(self._unconfirmed) + len(self._returned) + len(self._nacked)

    @property
    def unconfirmed(self) -> list[Any]:
        return list(self._unconfirmed.values())

    def send(self, publication: Publication, *, timeout_seconds: float = CONFIRM_SECONDS) -> None:
        if self.connection is None:
            raise RecoverableConnectionError("connection already closed")
        message, exchange, routing_key, mandatory = publication
        arguments = (0, exchange, routing_key, mandatory, False)
        try:
            with self.connection.transport.having_timeout(timeout_seconds):
                self.send_method(spec.Basic.Publish, "Bssbb", arguments, message)
        except TimeoutError as exc:
            # Half of the message may be written, so the connection cannot be used any more.
            self.connection.transport.connected = False
            raise RecoverableConnectionError("publishing timed out") from exc
        self._published += 1
        self._unconfirmed[self._published] = publication

    def send_all(self, messages: Sequence[Any]) -> None:
        """Publish many messages with one write to the socket."""
        for message in messages:
            self._published += 1
            self._unconfirmed[self._published] = message
        self._transport.write(b"".join([message.frames for message in messages]))

    def take_nacked(self) -> list[Any]:
        nacked, self._nacked = self._nacked, []
        return nacked

    # --- reading -------------------------------------------------------------------------

    def read_ready(self) -> None:
        """Process the confirms that have already arrived, without waiting."""
        while self.is_readable(0):
            self.read()

    def read_down_to(self, unconfirmed: int, *, deadline: float | None = None) -> None:
        """Wait until *unconfirmed* or fewer messages lack a confirm, at most until *deadline*."""
        while len(self._unconfirmed) > unconfirmed:
            if deadline is not None and not self.is_readable(max(deadline - monotonic(), 0)):
                raise TimeoutError(f"{len(self._unconfirmed)} message(s) not confirmed in time")
            self.read()

    def wait_all(self, *, timeout_seconds: float) -> None:
        """Wait for all confirms; raise MessageNacked if the broker nacked a message.

        Raises NotConfirmed after *timeout_seconds*, and then forgets the unconfirmed messages: a
        late confirm does not concern the next message.
        """
        try:
            self.read_down_to(0, deadline=monotonic() + timeout_seconds)
        except TimeoutError as exc:
            self._unconfirmed.clear()
            raise NotConfirmed(
                f"expected RabbitMQ to confirm a delayed message within {timeout_seconds:g} s, got "
                f"no answer: it may have taken the message. See its log for alarms of memory or "
                f"disk, or publish with a longer confirm_timeout"
            ) from exc
        if self._nacked:
            self._nacked.clear()
            raise MessageNacked(NACKED)

    # --- what the broker says ------------------------------------------------------------

    def _on_basic_ack(self, delivery_tag: int, multiple: bool) -> None:
        settled = self._settle(delivery_tag, multiple)
        if self._returning:
            for message in settled:
                if self._returning[message.id] > 0:
                    self._returning -= Counter([message.id])
                    self._returned.append(message)

    def _on_basic_nack(self, delivery_tag: int, multiple: bool) -> None:
        self._nacked += self._settle(delivery_tag, multiple)

    def _settle(self, delivery_tag: int, multiple: bool) -> list[Any]:
        """Remove and return the messages that the broker acked or nacked."""
        unconfirmed = self._unconfirmed
        settled = []
        while multiple and unconfirmed and next(iter(unconfirmed)) <= delivery_tag:
            settled.append(unconfirmed.popitem(last=False)[1])
        if delivery_tag in unconfirmed:
            settled.append(unconfirmed.pop(delivery_tag))
        return settled

    def _on_basic_return(
        self, reply_code: int, reply_text: str, exchange: str, routing_key: str, message: Any
    ) -> None:
        # A confirm follows. https://www.rabbitmq.com/docs/confirms#when-publishes-are-confirmed
        self._returning[id_of(exchange, routing_key, message.properties, message.body)] += 1


def _has_input(socket: Any, timeout_seconds: float) -> bool:
    if hasattr(socket, "pending") and socket.pending():
        return True
    poll = select.poll()
    poll.register(socket, select.POLLIN)
    return bool(poll.poll(timeout_seconds * 1000))

"""Channels of our own on the user's connection, and what is published on them.

An error closes the channel it happened on, and confirm mode is per channel and irreversible; the
user's channel sees neither.
"""

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

from ...errors import RefusedMessage
from ...message import HEADER

logger = logging.getLogger(__name__)


class Publication(NamedTuple):
    """A message on its way, and with what it is published."""

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
    """The name of a message published so; copies of one delivery have it in common."""
    header = (properties.get("application_headers") or {}).get(HEADER)
    known_by = header.get("id") if isinstance(header, dict) else None
    known_by = known_by or properties.get("correlation_id") or body
    return exchange, routing_key, known_by.encode() if isinstance(known_by, str) else known_by


def received(message: amqp.Message) -> amqp.Message:
    """*message*, from a channel that decodes nothing, with a body that is bytes even when empty."""
    message.body = message.body or b""
    return message


class OwnChannel(amqp.Channel):  # type: ignore[misc]
    """An AMQP channel beside the user's; whether what it publishes arrives is not known."""

    #: Set when the broker closed this channel: (reply code, reply text).
    closed_with: tuple[int, str] | None = None

    def __init__(self, connection: Any) -> None:
        super().__init__(connection, auto_decode=False)
        self._returned: list[Publication] = []
        self.open()

    def send(self, message: Any, *, timeout_seconds: float | None = None) -> None:
        """Publish a publication, after a look whether the broker blocks us."""
        self._basic_publish(*message, timeout=timeout_seconds)

    def wait_all(self, *, timeout_seconds: float | None = None) -> None:
        """Wait for confirms, of which none come here."""

    def take_returned(self) -> list[Any]:
        """Mandatory messages that came back so far because no queue is bound for them."""
        returned, self._returned = self._returned, []
        return returned

    # --- the socket ----------------------------------------------------------------------

    @property
    def _transport(self) -> Any:
        if self.connection is None or self.connection._transport is None:
            raise RecoverableConnectionError("connection already closed")
        return self.connection._transport

    def is_readable(self, timeout_seconds: float) -> bool:
        """True if the broker sends something before the time is over."""
        transport = self._transport
        if transport.sock is None:
            raise RecoverableConnectionError("connection already closed")
        return bool(transport._read_buffer) or _has_input(transport.sock, timeout_seconds)

    def read(self) -> None:
        """Take in the next frame that the broker sends, waiting for it."""
        try:
            with suppress(TimeoutError):  # the connection's own read_timeout
                self.connection.blocking_read()
        except ChannelError as exc:
            if self.closed_with is not None:
                raise
            # Another channel of this connection was closed while we waited. Raising here would
            # have the caller send again what the broker is about to confirm.
            logger.error("channel error of an earlier operation: %s", exc)

    # --- what the broker says ------------------------------------------------------------

    def _on_basic_return(
        self, reply_code: int, reply_text: str, exchange: str, routing_key: str, message: Any
    ) -> None:
        self._returned.append(Publication(received(message), exchange, routing_key))

    def _on_close(self, reply_code: int, reply_text: str, class_id: int, method_id: int) -> None:
        """Give the channel up; py-amqp would open it again, without confirm mode."""
        self.closed_with = (reply_code, reply_text)
        self.send_method(spec.Channel.CloseOk)
        self.collect()
        raise error_for_code(reply_code, reply_text, (class_id, method_id), ChannelError)


class WindowChannel(OwnChannel):
    """A channel that publishes without waiting, and keeps what is not confirmed yet."""

    def __init__(self, connection: Any) -> None:
        super().__init__(connection)
        self._published = 0
        #: By delivery tag.
        self._unconfirmed: OrderedDict[int, Any] = OrderedDict()
        #: How often each message is known to come back; its confirm follows.
        self._returning: Counter[Hashable] = Counter()
        self._came_back: list[Any] = []
        self._nacked: list[Any] = []
        self.confirm_select()

    @property
    def unconfirmed_count(self) -> int:
        return len(self._unconfirmed)

    @property
    def unconfirmed(self) -> list[Any]:
        """The messages that the broker has yet to confirm, oldest first."""
        return list(self._unconfirmed.values())

    def send(self, publication: Publication, *, timeout_seconds: float | None = None) -> None:
        """Publish without waiting; kept from here on unless this raises."""
        if self.connection is None:
            raise RecoverableConnectionError("connection already closed")
        message, exchange, routing_key, mandatory = publication
        arguments = (0, exchange, routing_key, mandatory, False)
        publish = spec.Basic.Publish, "Bssbb", arguments, message
        try:
            if timeout_seconds is None:
                self.send_method(*publish)
            else:
                with self.connection.transport.having_timeout(timeout_seconds):
                    self.send_method(*publish)
        except TimeoutError as exc:
            # Half of it may be on its way: the connection is of no more use.
            self.connection.transport.connected = False
            raise RecoverableConnectionError("publishing timed out") from exc
        self._published += 1
        self._unconfirmed[self._published] = publication

    def send_all(self, messages: Sequence[Any]) -> None:
        """Write the frames of *messages* at once; they are kept also if this raises."""
        for message in messages:
            self._published += 1
            self._unconfirmed[self._published] = message
        self._transport.write(b"".join([message.frames for message in messages]))

    def take_returned(self) -> list[Any]:
        """Messages that came back because no queue is bound where they were to go."""
        back, self._came_back = self._came_back, []
        return back

    def take_nacked(self) -> list[Any]:
        """Messages that the broker refused."""
        nacked, self._nacked = self._nacked, []
        return nacked

    # --- reading -------------------------------------------------------------------------

    def read_ready(self) -> None:
        """Take in what the broker has sent, without waiting for more.

        A ChannelError: it closed this channel; other errors: the connection is gone.
        """
        while self.is_readable(0):
            self.read()

    def read_down_to(self, unconfirmed: int, *, deadline: float | None = None) -> None:
        """Take in what the broker sends until at most so many are *unconfirmed*.

        Raises as :meth:`read_ready`, and TimeoutError where it takes longer than until
        *deadline*, in seconds of the monotonic clock.
        """
        while len(self._unconfirmed) > unconfirmed:
            if deadline is None:
                _ = self._transport  # or it is gone
            elif not self.is_readable(max(deadline - monotonic(), 0)):
                raise TimeoutError(f"{len(self._unconfirmed)} message(s) not confirmed in time")
            self.read()

    def wait_all(self, *, timeout_seconds: float | None = None) -> None:
        """Return when the broker has taken responsibility for everything.

        Raises MessageNacked for what it refused, TimeoutError without an answer in time.
        """
        deadline = None if timeout_seconds is None else monotonic() + timeout_seconds
        self.read_down_to(0, deadline=deadline)
        if self._nacked:
            nacked = len(self.take_nacked())
            raise MessageNacked(f"the broker refused {nacked} delayed message(s)")

    # --- what the broker says ------------------------------------------------------------

    def _on_basic_ack(self, delivery_tag: int, multiple: bool) -> None:
        settled = self._settle(delivery_tag, multiple)
        if self._returning:
            for message in settled:
                if self._returning[message.id] > 0:
                    self._returning -= Counter([message.id])
                    self._came_back.append(message)

    def _on_basic_nack(self, delivery_tag: int, multiple: bool) -> None:
        self._nacked += self._settle(delivery_tag, multiple)

    def _settle(self, delivery_tag: int, multiple: bool) -> list[Any]:
        """Take what the broker has decided on out of the unconfirmed."""
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
        # Its confirm follows. https://www.rabbitmq.com/docs/confirms#when-publishes-are-confirmed
        self._returning[id_of(exchange, routing_key, message.properties, message.body)] += 1


def _has_input(socket: Any, timeout_seconds: float) -> bool:
    """True if *socket*, TLS or not, has something to read before the time is over."""
    if hasattr(socket, "pending") and socket.pending():
        return True
    poll = select.poll()
    poll.register(socket, select.POLLIN)
    return bool(poll.poll(timeout_seconds * 1000))

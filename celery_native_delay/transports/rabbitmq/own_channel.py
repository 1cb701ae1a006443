"""A channel of our own on the user's connection, in confirm mode.

Confirm mode is per channel and irreversible, and an error closes the channel it happened on;
the user's channel sees neither.

Confirms are read as they come, many with one look at the socket; py-amqp reads three times for
each of them.
"""

from __future__ import annotations

import logging
import select
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from struct import Struct
from time import monotonic
from typing import Any

import amqp
from amqp import spec
from amqp.exceptions import (
    ChannelError,
    MessageNacked,
    RecoverableConnectionError,
    UnexpectedFrame,
    error_for_code,
)

from .encoded import received
from .frame_writer import FRAME, FRAME_BYTES, FRAME_END, METHOD_FRAME

logger = logging.getLogger(__name__)

READ_BYTES = 65_536

_ACK = Struct(">QB")
_ACK_METHOD = b"".join(number.to_bytes(2, "big") for number in spec.Basic.Ack)
_ACK_BYTES = len(_ACK_METHOD) + _ACK.size


def is_readable(socket: Any, timeout_seconds: float | None) -> bool:
    """Whether *socket*, TLS or not, has something to read before the time is over; None: never."""
    if hasattr(socket, "pending") and socket.pending():
        return True
    poll = select.poll()
    poll.register(socket, select.POLLIN)
    return bool(poll.poll(None if timeout_seconds is None else timeout_seconds * 1000))


@dataclass(frozen=True)
class Returned:
    """A mandatory message that the broker could not route."""

    message: amqp.Message
    exchange: str
    routing_key: str


class OwnChannel(amqp.Channel):  # type: ignore[misc]
    """An AMQP channel that knows which of its publishes the broker has confirmed."""

    #: Set when the broker closed this channel: (reply code, reply text).
    closed_with: tuple[int, str] | None = None

    def __init__(self, connection: Any, *, confirm: bool = True) -> None:
        """Without *confirm* nothing published here is ever known to have arrived."""
        super().__init__(connection, auto_decode=False)
        self._confirms = confirm
        self._published = 0
        #: By delivery tag; the values are for subclasses.
        self._unconfirmed: OrderedDict[int, Any] = OrderedDict()
        self._refused: set[int] = set()
        self._returned: list[Returned] = []
        self.open()
        if confirm:
            self.confirm_select()

    def publish(
        self,
        message: amqp.Message,
        exchange: str,
        routing_key: str,
        mandatory: bool = False,
        *,
        timeout_seconds: float | None = None,
    ) -> int:
        """Publish and return the delivery tag that :meth:`wait_confirmed` takes."""
        if self._confirms:
            to = message, exchange, routing_key, mandatory
            self._write(self.write_publish, *to, timeout_seconds=timeout_seconds)
        else:
            # This also looks whether the broker blocks us; else waiting for the confirm does.
            self._basic_publish(message, exchange, routing_key, mandatory, timeout=timeout_seconds)
        self._published += 1
        if self._confirms:
            self._unconfirmed[self._published] = None
        return self._published

    def write_publish(
        self, message: amqp.Message, exchange: str, routing_key: str, mandatory: bool
    ) -> None:
        """Write the frames of a publish to the socket, and no more."""
        arguments = (0, exchange, routing_key, mandatory, False)
        self.send_method(spec.Basic.Publish, "Bssbb", arguments, message)

    def wait_confirmed(self, tag: int, *, timeout_seconds: float | None = None) -> None:
        """Return when the broker has taken responsibility for *tag* and all before it.

        Raises:
            MessageNacked: the broker refused one of them.
            amqp.exceptions.ChannelError: the broker closed this channel.
            TimeoutError: no answer within *timeout_seconds*.
        """
        deadline = None if timeout_seconds is None else monotonic() + timeout_seconds
        while self._unconfirmed and next(iter(self._unconfirmed)) <= tag:
            if self.connection is None:
                raise RecoverableConnectionError("connection closed before the broker confirmed")
            left = None if deadline is None else max(deadline - monotonic(), 0.001)
            if left is not None and not self._is_readable(left):
                raise TimeoutError("the broker has not confirmed in time")
            self._read()
        refused = {number for number in self._refused if number <= tag}
        if refused:
            self._refused -= refused
            raise MessageNacked(f"the broker refused {len(refused)} delayed message(s)")

    def wait_all(self) -> None:
        """:meth:`wait_confirmed` for everything published so far."""
        self.wait_confirmed(self._published)

    def take_returned(self) -> list[Returned]:
        """Mandatory messages that nobody was bound for; complete after a wait."""
        returned, self._returned = self._returned, []
        return returned

    # --- the socket ----------------------------------------------------------------------

    def _write(
        self, write: Callable[..., object], *what: Any, timeout_seconds: float | None
    ) -> None:
        if self.connection is None:
            raise RecoverableConnectionError("connection already closed")
        try:
            if timeout_seconds is None:
                write(*what)
            else:
                with self.connection.transport.having_timeout(timeout_seconds):
                    write(*what)
        except TimeoutError as exc:
            # Half of it may be on its way: the connection is of no more use.
            self.connection.transport.connected = False
            raise RecoverableConnectionError("publishing timed out") from exc

    @property
    def _transport(self) -> Any:
        if self.connection is None or self.connection._transport is None:
            raise RecoverableConnectionError("connection already closed")
        return self.connection._transport

    def _is_readable(self, timeout_seconds: float | None) -> bool:
        socket = self._transport.sock
        if socket is None:
            raise RecoverableConnectionError("connection already closed")
        return is_readable(socket, timeout_seconds)

    def _read(self) -> None:
        """Wait for what the broker sends next, and take in all that is there."""
        transport = self._transport
        try:
            data = transport.sock.recv(READ_BYTES)
        except BlockingIOError:  # the connection's own read_timeout; as py-amqp
            return
        if not data:
            transport.connected = False
            raise RecoverableConnectionError("the broker closed the connection")
        # py-amqp reads on from here, so what is incomplete is left to it.
        buffer = transport._read_buffer + data
        at = 0
        while len(buffer) - at >= FRAME_BYTES:
            kind, channel_id, size = FRAME.unpack_from(buffer, at)
            payload_at = at + FRAME.size
            end = payload_at + size
            if len(buffer) <= end:
                break
            if buffer[end] != FRAME_END[0]:
                raise UnexpectedFrame(f"expected the end of a frame, got {buffer[end]:#04x}")
            at = end + 1
            if (
                kind == METHOD_FRAME
                and size == _ACK_BYTES
                and channel_id == self.channel_id
                and buffer.startswith(_ACK_METHOD, payload_at)
            ):
                tag, multiple = _ACK.unpack_from(buffer, payload_at + len(_ACK_METHOD))
                self.connection.bytes_recv += 1
                self._on_basic_ack(tag, bool(multiple & 1))
                continue
            # It may raise, and it may read by itself.
            transport._read_buffer = buffer[at:]
            self._dispatch((kind, channel_id, buffer[payload_at:end]))
            if self.connection is None:
                return
            buffer, at = transport._read_buffer, 0
        transport._read_buffer = buffer[at:]

    def _dispatch(self, frame: tuple[int, int, bytes]) -> None:
        try:
            self.connection.on_inbound_frame(frame)
        except ChannelError as exc:
            if self.closed_with is not None:
                raise
            # Another channel of this connection was closed while we waited. Raising here would
            # have the caller send again what the broker is about to confirm.
            logger.error("channel error of an earlier operation: %s", exc)

    # --- what the broker says ------------------------------------------------------------

    def _on_basic_ack(self, delivery_tag: int, multiple: bool) -> None:
        self._settle(delivery_tag, multiple)

    def _on_basic_nack(self, delivery_tag: int, multiple: bool) -> None:
        self._refused.update(tag for tag, _ in self._settle(delivery_tag, multiple))

    def _settle(self, delivery_tag: int, multiple: bool) -> list[tuple[int, Any]]:
        """Take what the broker has decided on out of the unconfirmed."""
        unconfirmed = self._unconfirmed
        settled = []
        while multiple and unconfirmed and next(iter(unconfirmed)) <= delivery_tag:
            settled.append(unconfirmed.popitem(last=False))
        if delivery_tag in unconfirmed:
            settled.append((delivery_tag, unconfirmed.pop(delivery_tag)))
        return settled

    def _on_basic_return(
        self, reply_code: int, reply_text: str, exchange: str, routing_key: str, message: Any
    ) -> None:
        self._returned.append(Returned(received(message), exchange, routing_key))

    def _on_close(self, reply_code: int, reply_text: str, class_id: int, method_id: int) -> None:
        """Give the channel up; py-amqp would open it again, without confirm mode."""
        self.closed_with = (reply_code, reply_text)
        self.send_method(amqp.spec.Channel.CloseOk)
        self.collect()
        raise error_for_code(reply_code, reply_text, (class_id, method_id), ChannelError)

"""A channel of our own on the user's connection, in confirm mode.

Confirm mode is per channel and irreversible, and an error closes the channel it happened on;
the user's channel sees neither.
"""

from __future__ import annotations

import logging
import select
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from time import monotonic
from typing import Any

import amqp
from amqp import spec
from amqp.exceptions import (
    ChannelError,
    MessageNacked,
    RecoverableConnectionError,
    error_for_code,
)

from .body import received

logger = logging.getLogger(__name__)


def _has_input(socket: Any, timeout_seconds: float | None) -> bool:
    """True if *socket*, TLS or not, has something to read before the time is over."""
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
        #: Mandatory messages that no queue was bound for; complete after a wait.
        self.returned: list[Returned] = []
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

        Raises MessageNacked for what it refused, TimeoutError without an answer in time.
        """
        deadline = None if timeout_seconds is None else monotonic() + timeout_seconds
        while self._unconfirmed and next(iter(self._unconfirmed)) <= tag:
            if self.connection is None:
                raise RecoverableConnectionError("connection closed before the broker confirmed")
            left = None if deadline is None else max(deadline - monotonic(), 0.001)
            if left is not None and not self.is_readable(left):
                raise TimeoutError("the broker has not confirmed in time")
            self.read()
        refused = {number for number in self._refused if number <= tag}
        if refused:
            self._refused -= refused
            raise MessageNacked(f"the broker refused {len(refused)} delayed message(s)")

    def wait_all(self) -> None:
        """:meth:`wait_confirmed` for everything published so far."""
        self.wait_confirmed(self._published)

    def take_returned(self) -> list[Returned]:
        returned, self.returned = self.returned, []
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

    def is_readable(self, timeout_seconds: float | None) -> bool:
        """True if the broker sends something before the time is over; None: wait for ever."""
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
        self.returned.append(Returned(received(message), exchange, routing_key))

    def _on_close(self, reply_code: int, reply_text: str, class_id: int, method_id: int) -> None:
        """Give the channel up; py-amqp would open it again, without confirm mode."""
        self.closed_with = (reply_code, reply_text)
        self.send_method(amqp.spec.Channel.CloseOk)
        self.collect()
        raise error_for_code(reply_code, reply_text, (class_id, method_id), ChannelError)

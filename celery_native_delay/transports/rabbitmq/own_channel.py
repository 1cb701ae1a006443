"""A channel of our own on the user's connection.

An error closes the channel it happened on, and confirm mode is per channel and irreversible; the
user's channel sees neither.
"""

from __future__ import annotations

import logging
import select
from contextlib import suppress
from typing import Any

import amqp
from amqp.exceptions import ChannelError, RecoverableConnectionError, error_for_code

from .body import received
from .publication import Publication

logger = logging.getLogger(__name__)


def _has_input(socket: Any, timeout_seconds: float | None) -> bool:
    """True if *socket*, TLS or not, has something to read before the time is over."""
    if hasattr(socket, "pending") and socket.pending():
        return True
    poll = select.poll()
    poll.register(socket, select.POLLIN)
    return bool(poll.poll(None if timeout_seconds is None else timeout_seconds * 1000))


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

    def _on_basic_return(
        self, reply_code: int, reply_text: str, exchange: str, routing_key: str, message: Any
    ) -> None:
        self._returned.append(Publication(received(message), exchange, routing_key))

    def _on_close(self, reply_code: int, reply_text: str, class_id: int, method_id: int) -> None:
        """Give the channel up; py-amqp would open it again, without confirm mode."""
        self.closed_with = (reply_code, reply_text)
        self.send_method(amqp.spec.Channel.CloseOk)
        self.collect()
        raise error_for_code(reply_code, reply_text, (class_id, method_id), ChannelError)

"""A channel of our own on the user's connection, in confirm mode.

Confirm mode is per channel and irreversible, and an error closes the channel it happened on;
the user's channel sees neither.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from dataclasses import dataclass
from time import monotonic
from typing import Any

import amqp
from amqp.exceptions import (
    ChannelError,
    MessageNacked,
    RecoverableConnectionError,
    error_for_code,
)

logger = logging.getLogger(__name__)


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
        super().__init__(connection)
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
        """Publish and return the delivery tag that :meth:`wait` takes."""
        self._basic_publish(message, exchange, routing_key, mandatory, timeout=timeout_seconds)
        self._published += 1
        if self._confirms:
            self._unconfirmed[self._published] = None
        return self._published

    def wait_confirmed(self, tag: int, *, timeout_seconds: float | None = None) -> None:
        """Return when the broker has taken responsibility for *tag* and all before it.

        Raises:
            MessageNacked: the broker refused one of them.
            amqp.exceptions.ChannelError: the broker closed this channel.
            socket.timeout: no answer within *timeout_seconds*.
        """
        deadline = None if timeout_seconds is None else monotonic() + timeout_seconds
        while self._unconfirmed and next(iter(self._unconfirmed)) <= tag:
            if self.connection is None:
                raise RecoverableConnectionError("connection closed before the broker confirmed")
            left = None if deadline is None else max(deadline - monotonic(), 0.001)
            try:
                self.connection.drain_events(timeout=left)
            except ChannelError as exc:
                if self.closed_with is not None:
                    raise
                # Another channel of this connection was closed while we waited. Raising here
                # would have the caller send again what the broker is about to confirm.
                logger.error("channel error of an earlier operation: %s", exc)
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
        self._returned.append(Returned(message, exchange, routing_key))

    def _on_close(self, reply_code: int, reply_text: str, class_id: int, method_id: int) -> None:
        """Give the channel up; py-amqp would open it again, without confirm mode."""
        self.closed_with = (reply_code, reply_text)
        self.send_method(amqp.spec.Channel.CloseOk)
        self.collect()
        raise error_for_code(reply_code, reply_text, (class_id, method_id), ChannelError)

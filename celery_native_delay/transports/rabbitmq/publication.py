"""Messages on their way to the broker, and the name by which it returns them."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, NamedTuple, Protocol

import amqp

from ...errors import RefusedMessage
from ...message import HEADER


class Sendable(Protocol):
    """A message that can be sent, kept until it is confirmed, and sent again."""

    @property
    def exchange(self) -> str:
        """The exchange it is published to."""

    @property
    def id(self) -> Hashable:
        """The name by which the message is known when the broker returns it."""

    def write(self, channel: Any) -> None:
        """Write its frames for *channel* to the socket."""

    def refused(self, reason: str) -> RefusedMessage:
        """The report if the broker does not take it."""


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

    def write(self, channel: Any) -> None:
        channel.write_now()
        channel.write_publish(*self)

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

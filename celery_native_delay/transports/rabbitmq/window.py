"""A channel that publishes without waiting: what the broker has not confirmed yet is kept."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable
from time import monotonic
from typing import Any, NamedTuple, Protocol

import amqp

from ...errors import RefusedMessage
from ...message import HEADER
from .own_channel import OwnChannel

#: Frames that come ready-made are written so many at a time.
WRITE_MESSAGES = 64
WRITE_BYTES = 65_536


class NotConfirmedInTime(TimeoutError):
    """The broker is slow; unlike other timeouts, the connection is as it was."""


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
        return _id_of(self.exchange, self.routing_key, message.properties, message.body)

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


class WindowChannel(OwnChannel):
    """A channel that publishes without waiting, and keeps what is not confirmed yet."""

    def __init__(self, connection: Any) -> None:
        super().__init__(connection)
        #: How often each message is known to come back; its confirm follows.
        self._returning: Counter[Hashable] = Counter()
        self._unwritten: list[bytes] = []
        self._unwritten_bytes = 0
        self._unwritten_since = 0.0
        self._came_back: list[Sendable] = []
        self._nacked: list[Sendable] = []

    @property
    def is_usable(self) -> bool:
        return self.connection is not None and bool(self.connection.connected)

    @property
    def published_count(self) -> int:
        return self._published

    @property
    def unconfirmed_count(self) -> int:
        return len(self._unconfirmed)

    @property
    def unwritten_seconds(self) -> float:
        """The time for which the oldest message has waited to be written; 0 without one."""
        return monotonic() - self._unwritten_since if self._unwritten else 0.0

    @property
    def unconfirmed(self) -> list[Sendable]:
        """The messages that the broker has yet to confirm, oldest first."""
        return list(self._unconfirmed.values())

    def send(self, message: Sendable, *, timeout_seconds: float | None = None) -> None:
        """Publish without waiting; kept from here on unless this raises."""
        self._write(message.write, self, timeout_seconds=timeout_seconds)
        self._published += 1
        self._unconfirmed[self._published] = message

    def write_soon(self, frames: bytes) -> None:
        """Write together with those that follow, before anything is waited for."""
        if not self._unwritten:
            self._unwritten_since = monotonic()
        self._unwritten.append(frames)
        self._unwritten_bytes += len(frames)
        if len(self._unwritten) >= WRITE_MESSAGES or self._unwritten_bytes >= WRITE_BYTES:
            self.write_now()

    def write_now(self) -> None:
        """Write what :meth:`write_soon` has collected."""
        if self._unwritten:
            frames, self._unwritten, self._unwritten_bytes = self._unwritten, [], 0
            self._transport.write(b"".join(frames))
            self.connection.bytes_sent += len(frames)

    def take_returned(self) -> list[Sendable]:  # type: ignore[override]
        """Messages that came back because no queue is bound where they were to go."""
        back, self._came_back = self._came_back, []
        return back

    def take_nacked(self) -> list[Sendable]:
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

    def read_until(self, condition: Callable[[], bool], *, deadline: float | None = None) -> None:
        """Take in what the broker sends until *condition* holds; raises as :meth:`read_ready`.

        NotConfirmedInTime: it does not by *deadline*, in seconds of the monotonic clock.
        """
        while not condition():
            left = None if deadline is None else max(deadline - monotonic(), 0)
            if not self.is_readable(left):
                raise NotConfirmedInTime(
                    f"{len(self._unconfirmed)} message(s) not confirmed in time"
                )
            self.read()

    def read_all(self, *, deadline: float | None = None) -> None:
        """Take in what the broker sends until nothing is unconfirmed; raises likewise."""
        self.read_until(lambda: not self._unconfirmed, deadline=deadline)

    def is_readable(self, timeout_seconds: float | None) -> bool:
        self.write_now()
        return super().is_readable(timeout_seconds)

    # --- what the broker says ------------------------------------------------------------

    def _on_basic_ack(self, delivery_tag: int, multiple: bool) -> None:
        settled = self._settle(delivery_tag, multiple)
        if self._returning:
            for _, message in settled:
                if self._returning[message.id] > 0:
                    self._returning -= Counter([message.id])
                    self._came_back.append(message)

    def _on_basic_nack(self, delivery_tag: int, multiple: bool) -> None:
        self._nacked += [message for _, message in self._settle(delivery_tag, multiple)]

    def _on_basic_return(
        self, reply_code: int, reply_text: str, exchange: str, routing_key: str, message: Any
    ) -> None:
        # Its confirm follows. https://www.rabbitmq.com/docs/confirms#when-publishes-are-confirmed
        self._returning[_id_of(exchange, routing_key, message.properties, message.body)] += 1


def _id_of(exchange: str, routing_key: str, properties: Any, body: bytes | str) -> Hashable:
    header = (properties.get("application_headers") or {}).get(HEADER)
    if header:
        return str(header["id"])
    known_by = properties.get("correlation_id") or body
    return exchange, routing_key, known_by.encode() if isinstance(known_by, str) else known_by

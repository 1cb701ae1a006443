"""A channel that publishes without waiting: what the broker has not confirmed yet is kept."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable
from time import monotonic
from typing import Any

import amqp
from amqp import spec
from amqp.exceptions import MessageNacked, RecoverableConnectionError

from .own_channel import OwnChannel
from .publication import Sendable, id_of

#: Frames that come ready-made are written so many at a time.
WRITE_MESSAGES = 64
WRITE_BYTES = 65_536


class NotConfirmedInTime(TimeoutError):
    """The broker is slow; unlike other timeouts, the connection is as it was."""


class WindowChannel(OwnChannel):
    """A channel that publishes without waiting, and keeps what is not confirmed yet."""

    def __init__(self, connection: Any) -> None:
        super().__init__(connection)
        self._published = 0
        #: By delivery tag.
        self._unconfirmed: OrderedDict[int, Sendable] = OrderedDict()
        #: How often each message is known to come back; its confirm follows.
        self._returning: Counter[Hashable] = Counter()
        self._unwritten: list[bytes] = []
        self._unwritten_bytes = 0
        self._unwritten_since = 0.0
        self._came_back: list[Sendable] = []
        self._nacked: list[Sendable] = []
        self.confirm_select()

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
        if self.connection is None:
            raise RecoverableConnectionError("connection already closed")
        try:
            if timeout_seconds is None:
                message.write(self)
            else:
                with self.connection.transport.having_timeout(timeout_seconds):
                    message.write(self)
        except TimeoutError as exc:
            # Half of it may be on its way: the connection is of no more use.
            self.connection.transport.connected = False
            raise RecoverableConnectionError("publishing timed out") from exc
        self._published += 1
        self._unconfirmed[self._published] = message

    def write_publish(
        self, message: amqp.Message, exchange: str, routing_key: str, mandatory: bool
    ) -> None:
        """Write the frames of a publish to the socket, and no more."""
        arguments = (0, exchange, routing_key, mandatory, False)
        self.send_method(spec.Basic.Publish, "Bssbb", arguments, message)

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

    def take_returned(self) -> list[Any]:
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
            if deadline is None:
                self.write_now()
                _ = self._transport  # or it is gone
            elif not self.is_readable(max(deadline - monotonic(), 0)):
                raise NotConfirmedInTime(
                    f"{len(self._unconfirmed)} message(s) not confirmed in time"
                )
            self.read()

    def read_all(self, *, deadline: float | None = None) -> None:
        """Take in what the broker sends until nothing is unconfirmed; raises likewise."""
        self.read_until(lambda: not self._unconfirmed, deadline=deadline)

    def wait_all(self, *, timeout_seconds: float | None = None) -> None:
        """Return when the broker has taken responsibility for everything.

        Raises MessageNacked for what it refused, NotConfirmedInTime without an answer in time.
        """
        self.read_all(deadline=None if timeout_seconds is None else monotonic() + timeout_seconds)
        if nacked := self.take_nacked():
            raise MessageNacked(f"the broker refused {len(nacked)} delayed message(s)")

    def is_readable(self, timeout_seconds: float | None) -> bool:
        self.write_now()
        return super().is_readable(timeout_seconds)

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

    def _settle(self, delivery_tag: int, multiple: bool) -> list[Sendable]:
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

"""Publish many messages over one channel, and tell which of them the broker refused."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from contextlib import suppress
from itertools import islice
from types import NoneType
from typing import Any

from amqp.exceptions import AccessRefused, ChannelError, FrameSyntaxError, MessageNacked

from ...errors import CannotDelay, PublishRefused
from .address import is_nameable
from .channels import NACKED, OwnChannel, Publication, WindowChannel
from .template import FramedPublication
from .topology import is_delay_name

#: Messages that one write to the socket sends.
_AT_ONCE = 100

#: RabbitMQ 4 takes 16 MiB, and closes the channel for more. Older releases take 128 MiB.
_LARGE_BYTES = 16 * 2**20

#: What py-amqp raises for values that AMQP does not have, such as an integer of 65 bits.
UNENCODABLE = (FrameSyntaxError, struct.error, TypeError, ValueError)


def unencodable(error: Exception) -> PublishRefused:
    return PublishRefused(f"{type(error).__name__}: {error}")


def text_of(error: Exception) -> str:
    """Return why the broker, or py-amqp, refused a message."""
    return str(getattr(error, "reply_text", error))


class NoRoute(ChannelError):  # type: ignore[misc]
    """No queue is bound for a message, so the broker returned it."""


#: Outcomes of a message whose exchange has taken it.
_TAKEN = (NoneType, NoRoute, MessageNacked)


class Deliverer:
    """Publishes messages, a batch at a time, and tells which of them the broker refused."""

    def __init__(self, connection: Any) -> None:
        """*connection* is a connection of py-amqp."""
        self._connection = connection
        self._channel: WindowChannel | None = None
        #: Exchanges that have taken a message since the broker last closed the channel.
        self._exchanges: set[str] = set()

    @property
    def user(self) -> str:
        return str(self._connection.client.userid or "guest")

    def deliver(
        self,
        publications: Mapping[int, Publication],
        outcomes: dict[int, Exception | None],
        *,
        deadline: float | None = None,
    ) -> None:
        """Publish messages; add to *outcomes* None for a confirmed one, or the refusal.

        *deadline* is a time of the monotonic clock. Raises an error of the connection, also if no
        confirm came before the deadline. Messages in doubt are then missing in *outcomes*.
        """
        waiting: dict[int, Publication] = {}
        for at, publication in publications.items():
            is_large = len(publication.message.body or b"") > _LARGE_BYTES
            if publication.exchange in self._exchanges and not is_large:
                waiting[at] = publication
                continue
            # Alone: if RabbitMQ refuses it by closing the channel, no other message is in doubt.
            self._send_some(waiting, outcomes, deadline)
            waiting = {}
            try:
                self._check_exchange(publication.exchange)
            except (CannotDelay, ChannelError) as exc:
                outcomes[at] = exc
            except UNENCODABLE as exc:
                outcomes[at] = unencodable(exc)
            else:
                self._send({at: publication}, outcomes, deadline)
                if isinstance(outcomes[at], _TAKEN):
                    self._exchanges.add(publication.exchange)
        self._send_some(waiting, outcomes, deadline)

    def _send_some(
        self,
        messages: Mapping[int, Publication],
        outcomes: dict[int, Exception | None],
        deadline: float | None,
    ) -> None:
        if messages and not self._send(messages, outcomes, deadline):
            # The broker refused a message by closing the channel: find out which.
            for at, publication in messages.items():
                if at not in outcomes:
                    self._send({at: publication}, outcomes, deadline)

    def close(self) -> None:
        if self._channel is not None and self._channel.connection is not None:
            self._channel.close()

    def _check_exchange(self, exchange: str) -> None:
        """Raise ChannelError or CannotDelay if the broker refuses all messages for *exchange*.

        A publish to a missing exchange would close the channel.
        """
        if not exchange or exchange in self._exchanges or is_delay_name(exchange):
            return
        if not is_nameable(exchange, self._connection.virtual_host, self.user):
            raise CannotDelay("RabbitMQ cannot quote the exchange's long name in an error")
        channel = OwnChannel(self._connection)
        # Some releases of RabbitMQ want more rights for this question than for a publish.
        with suppress(AccessRefused):
            channel.exchange_declare(exchange, "", passive=True)
            channel.close()

    def _send(
        self,
        messages: Mapping[int, Publication],
        outcomes: dict[int, Exception | None],
        deadline: float | None,
    ) -> bool:
        """Send messages, and note their outcomes; return False if the broker closed the channel."""
        channel = self._open()
        sent: dict[int, FramedPublication] = {}
        encoded_for = channel.channel_id, self._connection.frame_max
        try:
            for start in range(0, len(messages), _AT_ONCE):
                some: dict[int, FramedPublication] = {}
                for at, publication in islice(messages.items(), start, start + _AT_ONCE):
                    framed = FramedPublication(publication, publication[1:3])
                    try:
                        framed.encode(*encoded_for)
                    except UNENCODABLE as exc:
                        outcomes[at] = unencodable(exc)
                        continue
                    some[at] = framed
                sent |= some
                channel.send_all(list(some.values()))
                channel.read_ready()
            channel.read_down_to(0, deadline=deadline)
        except ChannelError as exc:
            self._channel = None
            self._exchanges.difference_update(each.exchange for each in messages.values())
            if len(messages) == 1:
                outcomes |= dict.fromkeys(messages, exc)
            return False
        finally:
            in_doubt = {id(each) for each in channel.unconfirmed}
            no_route = NoRoute("no queue is bound for it (NO_ROUTE)")
            nacked = MessageNacked(NACKED)
            errors: dict[int, Exception] = {id(each): no_route for each in channel.take_returned()}
            errors |= {id(each): nacked for each in channel.take_nacked()}
            for at, framed in sent.items():
                if id(framed) not in in_doubt:
                    outcomes[at] = errors.get(id(framed))
        return True

    def _open(self) -> WindowChannel:
        if self._channel is None or self._channel.connection is None:
            self._channel = WindowChannel(self._connection)
        return self._channel

"""Publish due messages to the user's exchanges and queues, and tell which of them are refused."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from itertools import islice
from typing import Any

from amqp.exceptions import AccessRefused, ChannelError, FrameSyntaxError

from .address import is_nameable
from .channels import OwnChannel, Publication, WindowChannel
from .template import FramedPublication

_NO_ROUTE = "no queue is bound for it (NO_ROUTE)"
_NACKED = "the broker refused it (basic.nack)"

#: Messages that one write to the socket sends.
_AT_ONCE = 100

#: What py-amqp raises for values that AMQP does not have, such as an integer of 65 bits.
UNENCODABLE = (FrameSyntaxError, struct.error, TypeError, ValueError)


class Deliverer:
    """Publishes due messages, a batch at a time, and waits for the broker's confirms."""

    def __init__(self, connection: Any) -> None:
        """*connection* is a connection of py-amqp."""
        self._connection = connection
        self.user = str(connection.client.userid or "guest")
        self._channel: WindowChannel | None = None
        #: Exchanges that were there at the last look, since the channel was last closed.
        self._exchanges: set[str] = set()

    def deliver(
        self,
        publications: Mapping[int, Publication],
        outcomes: dict[int, str | None],
        *,
        deadline: float | None = None,
    ) -> None:
        """Publish messages; add to *outcomes* None for a confirmed one, or why it was refused.

        *deadline* is a time of the monotonic clock. Raises an error of the connection, also if no
        confirm came before the deadline. Messages in doubt are then missing in *outcomes*.
        """
        waiting: dict[int, Publication] = {}
        for at, publication in publications.items():
            try:
                reason = self._reason_against(publication.exchange)
            except UNENCODABLE as exc:
                reason = f"{type(exc).__name__}: {exc}"
            if reason is None:
                waiting[at] = publication
            else:
                outcomes[at] = reason
        if not self._send(waiting, outcomes, deadline):
            # The broker refused a message by closing the channel: find out which.
            for at, publication in waiting.items():
                if at not in outcomes:
                    self._send({at: publication}, outcomes, deadline)

    def close(self) -> None:
        if self._channel is not None and self._channel.connection is not None:
            self._channel.close()

    def _reason_against(self, exchange: str) -> str | None:
        """Return why the broker refuses all messages for an exchange; None if it exists.

        A publish to a missing exchange would close the channel, and leave the messages before it in
        doubt.
        """
        if not exchange or exchange in self._exchanges:
            return None
        if not is_nameable(exchange, self._connection.virtual_host, self.user):
            return "RabbitMQ cannot quote the exchange's long name in an error"
        channel = OwnChannel(self._connection)
        try:
            channel.exchange_declare(exchange, "", passive=True)
        except AccessRefused:  # some releases of RabbitMQ want more rights for this than to publish
            pass
        except ChannelError as exc:
            return str(exc.reply_text)
        else:
            channel.close()
        self._exchanges.add(exchange)
        return None

    def _send(
        self,
        messages: Mapping[int, Publication],
        outcomes: dict[int, str | None],
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
                        outcomes[at] = f"{type(exc).__name__}: {exc}"
                        continue
                    some[at] = framed
                sent |= some
                channel.send_all(list(some.values()))
                channel.read_ready()
            channel.read_down_to(0, deadline=deadline)
        except ChannelError as exc:
            self._channel = None
            self._exchanges.clear()
            if len(messages) == 1:
                outcomes |= dict.fromkeys(messages, str(exc.reply_text))
            return False
        finally:
            in_doubt = {id(each) for each in channel.unconfirmed}
            reasons = {id(each): _NO_ROUTE for each in channel.take_returned()}
            reasons |= {id(each): _NACKED for each in channel.take_nacked()}
            for at, framed in sent.items():
                if id(framed) not in in_doubt:
                    outcomes[at] = reasons.get(id(framed))
        return True

    def _open(self) -> WindowChannel:
        if self._channel is None or self._channel.connection is None:
            self._channel = WindowChannel(self._connection)
        return self._channel

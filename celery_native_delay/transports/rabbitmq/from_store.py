"""Publish the tasks of a store to RabbitMQ when they are due, and make their rows."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from itertools import islice
from secrets import token_hex
from time import monotonic
from typing import Any

import amqp
from amqp.exceptions import ChannelError, FrameSyntaxError

from ...errors import errors_ignored
from ...message import HEADER
from ...store.entry import StoreEntry
from ..interface import Wait
from ..moving import expires_ms_of
from .address import is_nameable
from .channels import OwnChannel, Publication, WindowChannel
from .template import FramedPublication
from .wrapping import COUNTED_BY_THE_QUEUE, keep_user_id

_NO_ROUTE = "no queue is bound for it (NO_ROUTE)"
_NACKED = "the broker refused it (basic.nack)"

#: Messages that one write to the socket sends.
_AT_ONCE = 100

#: What py-amqp raises for values that AMQP does not have, such as an integer of 65 bits.
_UNENCODABLE = (FrameSyntaxError, struct.error, TypeError, ValueError)


def entry_of(
    message: amqp.Message, exchange: str, routing_key: str, *, due_us: int, now_us: int
) -> StoreEntry:
    """Return the entry of a message that a producer publishes."""
    properties = dict(message.properties)
    body = message.body
    if isinstance(body, str):  # as py-amqp does
        body = body.encode(properties.setdefault("content_encoding", "utf-8"))
    expires_ms = expires_ms_of(properties, now_us=now_us)
    return StoreEntry(
        due_us,
        exchange,
        routing_key,
        properties,
        bytes(body),
        token_hex(16),
        expires_ms=expires_ms,
    )


def entry_of_wait(wait: Wait) -> StoreEntry:
    """Return the entry of a message that a worker received, for the worker's queue only."""
    properties = dict(wait.message.properties)
    headers = dict(properties.get("application_headers") or {})
    for name in COUNTED_BY_THE_QUEUE:
        headers.pop(name, None)
    properties["application_headers"] = {**headers, **wait.headers}
    info, earlier = wait.message.delivery_info, wait.message.native_delay
    return StoreEntry(
        wait.due_us,
        info["exchange"],
        info["routing_key"],
        properties,
        wait.message.raw_body,
        wait.delivery_id or wait.new_id,
        wait.queue,
        None if earlier is None else earlier.expires_ms,
    )


class RowPublisher:
    """Publishes due messages, a batch at a time, and waits for the broker's confirms."""

    def __init__(self, connection: Any, *, timeout_seconds: float) -> None:
        """*connection* is a kombu connection, which this object closes."""
        self._kombus = connection
        self._timeout_seconds = timeout_seconds
        # One attempt for each URL, because the dispatcher makes the pauses between attempts.
        tries = len(connection.alt) or 1
        connection.ensure_connection(max_retries=tries, interval_start=0, interval_step=0)
        self._connection = connection.connection
        self._user = str(self._connection.client.userid or "guest")
        self._channel: WindowChannel | None = None
        #: Exchanges that were there at the last look, since the channel was last closed.
        self._exchanges: set[str] = set()
        self._lost = (OSError, *connection.connection_errors)
        self._lost_by: BaseException | None = None

    def close(self) -> None:
        with errors_ignored():  # the connection is given up anyway
            self._kombus.close()

    def publish(self, entries: Sequence[StoreEntry]) -> dict[int, str | None]:
        deadline = monotonic() + self._timeout_seconds
        outcomes: dict[int, str | None] = {}
        waiting: dict[int, Publication] = {}
        for at, entry in enumerate(entries):
            try:
                publication = self._publication(entry)
                reason = self._reason_against(publication.exchange)
            except _UNENCODABLE as exc:
                reason = f"{type(exc).__name__}: {exc}"
            if reason is None:
                waiting[at] = publication
            else:
                outcomes[at] = reason
        try:
            if self._send(waiting, outcomes, deadline):
                return outcomes
            # The broker refused a message by closing the channel: find out which.
            for at, publication in waiting.items():
                if at not in outcomes:
                    self._send({at: publication}, outcomes, deadline)
        except self._lost as exc:
            self._lost_by = exc
            if not outcomes:
                raise
        return outcomes

    def _reason_against(self, exchange: str) -> str | None:
        """Return why the broker refuses all messages for an exchange; None if it exists.

        A publish to a missing exchange would close the channel, and leave the messages before it in
        doubt.
        """
        if not exchange or exchange in self._exchanges:
            return None
        if not is_nameable(exchange, self._connection.virtual_host, self._user):
            return "RabbitMQ cannot quote the exchange's long name in an error"
        channel = OwnChannel(self._connection)
        try:
            channel.exchange_declare(exchange, "", passive=True)
        except ChannelError as exc:
            return str(exc.reply_text)
        channel.close()
        self._exchanges.add(exchange)
        return None

    def _publication(self, entry: StoreEntry) -> Publication:
        properties = entry.told()
        keep_user_id(properties, properties["application_headers"][HEADER], self._user)
        message = amqp.Message(entry.body, **properties)
        if entry.queue is not None:
            return Publication(message, "", entry.queue)
        return Publication(message, entry.exchange, entry.routing_key)

    def _send(
        self, messages: Mapping[int, Publication], outcomes: dict[int, str | None], deadline: float
    ) -> bool:
        """Send messages, and note their outcomes; return False if the broker closed the channel.

        Raises an error of the connection, also if no confirm came before *deadline*.
        """
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
                    except _UNENCODABLE as exc:
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
        if self._lost_by is not None:
            raise self._lost_by
        if self._channel is None or self._channel.connection is None:
            self._channel = WindowChannel(self._connection)
        return self._channel

"""Publish the tasks of a store to RabbitMQ when they are due, and make their rows."""

from __future__ import annotations

from collections.abc import Sequence
from secrets import token_hex
from time import monotonic
from typing import Any

import amqp
from amqp.exceptions import ChannelError

from ...errors import errors_ignored
from ...message import HEADER
from ...store.entry import Entry
from ..interface import Wait
from ..moving import expires_ms_of
from .channels import Publication, WindowChannel
from .wrapping import COUNTED_BY_THE_QUEUE, keep_user_id

_NO_ROUTE = "no queue is bound for it (NO_ROUTE)"
_NACKED = "the broker refused it (basic.nack)"


def entry_of(
    message: amqp.Message, exchange: str, routing_key: str, *, due_us: int, now_us: int
) -> Entry:
    """Return the entry of a message that a producer publishes."""
    properties = dict(message.properties)
    body = message.body
    if isinstance(body, str):  # as py-amqp does
        body = body.encode(properties.setdefault("content_encoding", "utf-8"))
    expires_ms = expires_ms_of(properties, now_us=now_us)
    return Entry(
        due_us,
        exchange,
        routing_key,
        properties,
        bytes(body),
        token_hex(16),
        expires_ms=expires_ms,
    )


def entry_of_wait(wait: Wait) -> Entry:
    """Return the entry of a message that a worker received, for the worker's queue only."""
    properties = dict(wait.message.properties)
    headers = dict(properties.get("application_headers") or {})
    for name in COUNTED_BY_THE_QUEUE:
        headers.pop(name, None)
    properties["application_headers"] = {**headers, **wait.headers}
    info, earlier = wait.message.delivery_info, wait.message.native_delay
    return Entry(
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

    def close(self) -> None:
        with errors_ignored():  # the connection is given up anyway
            self._kombus.close()

    def publish(self, entries: Sequence[Entry]) -> list[str | None]:
        publications = [self._publication(entry) for entry in entries]
        try:
            return self._sent(publications)
        except ChannelError:
            # The broker refused one message by closing the channel: find out which.
            self._channel = None
        return [self._sent_alone(each) for each in publications]

    def _publication(self, entry: Entry) -> Publication:
        properties = entry.told()
        keep_user_id(properties, properties["application_headers"][HEADER], self._user)
        message = amqp.Message(entry.body, **properties)
        if entry.queue is not None:
            return Publication(message, "", entry.queue)
        return Publication(message, entry.exchange, entry.routing_key)

    def _sent(self, publications: Sequence[Publication]) -> list[str | None]:
        channel = self._open()
        for each in publications:
            channel.send(each)
            channel.read_ready()
        channel.read_down_to(0, deadline=monotonic() + self._timeout_seconds)
        reasons = {id(each): _NO_ROUTE for each in channel.take_returned()}
        reasons |= {id(each): _NACKED for each in channel.take_nacked()}
        return [reasons.get(id(each)) for each in publications]

    def _sent_alone(self, publication: Publication) -> str | None:
        try:
            return self._sent([publication])[0]
        except ChannelError as exc:
            self._channel = None
            return str(exc.reply_text)

    def _open(self) -> WindowChannel:
        if self._channel is None or self._channel.connection is None:
            self._channel = WindowChannel(self._connection)
        return self._channel

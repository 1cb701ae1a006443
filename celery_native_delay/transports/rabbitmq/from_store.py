"""Publish the tasks of a store to RabbitMQ when they are due, and make their rows."""

from __future__ import annotations

from collections.abc import Sequence
from secrets import token_hex
from time import monotonic
from typing import Any

import amqp
from kombu.exceptions import OperationalError

from ...errors import described, errors_ignored
from ...message import HEADER
from ...store.entry import StoreEntry
from ..interface import Wait, connect_once
from ..moving import expires_ms_of
from .channels import Publication, in_bytes
from .delivering import UNENCODABLE, Deliverer, text_of, unencodable
from .wrapping import COUNTED_BY_THE_QUEUE, keep_user_id


def entry_of(
    message: amqp.Message, exchange: str, routing_key: str, *, due_us: int, now_us: int
) -> StoreEntry:
    """Return the entry of a message that a producer publishes."""
    message = in_bytes(message)
    properties, body = dict(message.properties), bytes(message.body)
    expires_ms = expires_ms_of(properties, now_us=now_us)
    where = exchange, routing_key
    return StoreEntry(due_us, *where, properties, body, token_hex(16), expires_ms=expires_ms)


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
    """Publishes due rows on a connection of its own."""

    def __init__(self, connection: Any, *, timeout_seconds: float) -> None:
        """*connection* is a kombu connection, which this object closes."""
        self._kombus = connection
        self._timeout_seconds = timeout_seconds
        connect_once(connection)
        self._deliverer = Deliverer(connection.connection)
        self._lost = (OSError, *connection.connection_errors)
        self._lost_by: BaseException | None = None

    def close(self) -> None:
        with errors_ignored():  # the connection is given up anyway
            self._kombus.close()

    def publish(self, entries: Sequence[StoreEntry]) -> dict[int, str | None]:
        if self._lost_by is not None:
            raise self._lost_by
        deadline = monotonic() + self._timeout_seconds
        outcomes: dict[int, Exception | None] = {}
        due: dict[int, Publication] = {}
        for at, entry in enumerate(entries):
            try:
                due[at] = self._publication(entry)
            except UNENCODABLE as exc:
                outcomes[at] = unencodable(exc)
        try:
            self._deliverer.deliver(due, outcomes, deadline=deadline)
        except self._lost as exc:
            self._lost_by = OperationalError(described(exc))
            if not outcomes:
                raise self._lost_by from exc
        return {at: None if error is None else text_of(error) for at, error in outcomes.items()}

    def _publication(self, entry: StoreEntry) -> Publication:
        properties = entry.told()
        header = properties["application_headers"][HEADER]
        keep_user_id(properties, header, self._deliverer.user)
        message = amqp.Message(entry.body, **properties)
        if entry.queue is not None:
            return Publication(message, "", entry.queue)
        return Publication(message, entry.exchange, entry.routing_key)

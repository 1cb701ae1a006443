"""Noting down in the ledger what is about to wait."""

from __future__ import annotations

from functools import cached_property
from time import time_ns
from typing import Any

import amqp

from ...message import HEADER, Delayed
from .ledger.connection import LedgerConnection, ledger_connection
from .ledger.entry import Entry, member_of
from .streams.connection import StreamConnection, stream_connection
from .streams.notes import Noted
from .topology import Topology


class Recorder:
    """The ledger's informant about what one connection sends. Never fails, hardly waits."""

    def __init__(self, connection: Any, topology: Topology) -> None:
        self._connection = connection
        self._topology = topology
        self._settings = topology.settings

    @cached_property
    def _redis(self) -> LedgerConnection | None:
        url, vhost = self._settings.ledger_url, self._connection.virtual_host
        return None if url is None else ledger_connection(url, self._settings.namespace, vhost)

    @cached_property
    def _streams(self) -> StreamConnection:
        return stream_connection(self._connection.client, self._settings)

    def record(self, message: amqp.Message, wrapped: amqp.Message, delayed: Delayed) -> None:
        """Note down what is about to be sent: a worker may have it soon."""
        header = wrapped.properties["application_headers"][HEADER]
        headers = message.properties.get("application_headers") or {}
        member = member_of(headers, delayed.delivery_id)
        if member is None:
            return
        body = message.body
        entry = Entry(
            message.properties,
            body.encode() if isinstance(body, str) else bytes(body),
            delayed.exchange,
            delayed.routing_key,
            delayed.queue,
            header.get("expires"),
        )
        replaced = None if delayed.replaces is None else delayed.replaces.delivery_id
        self.note(member, delayed.due_us, entry, replaced=replaced)

    def note(self, member: str, due_us: int, entry: Entry, *, replaced: str | None = None) -> None:
        """Note down an entry; *replaced* is the delivery id that it takes the place of, if any."""
        if self._redis is not None:
            self._redis.record(member, due_us, entry.encoded())
            return
        stream = self._topology.ledger.for_entry((due_us - time_ns() // 1000) / 1_000_000)
        noted = Noted(member.rpartition(":")[2], due_us, replaced)
        self._streams.record(stream, noted, entry.encoded())

    def forget(self, message: amqp.Message, delivery_id: str) -> None:
        """Strike what the broker did not take; what stands in a stream is due some day."""
        headers = message.properties.get("application_headers") or {}
        member = member_of(headers, delivery_id)
        if self._redis is not None and member is not None:
            self._redis.forget(member)

"""Noting down in the ledger what is about to wait."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import amqp

from ...message import HEADER, Delayed
from .ledger.connection import LedgerConnection, ledger_connection
from .ledger.entry import Entry, member_of


class Recorder:
    """The ledger's informant about what one connection sends. Never fails, hardly waits."""

    def __init__(self, connection: Any, url: str, namespace: str) -> None:
        self._connection = connection
        self._url = url
        self._namespace = namespace

    @cached_property
    def _ledger(self) -> LedgerConnection:
        return ledger_connection(self._url, self._namespace, self._connection.virtual_host)

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
        self.note(member, delayed.due_us, entry)

    def note(self, member: str, due_us: int, entry: Entry) -> None:
        """Note down an entry."""
        self._ledger.record(member, due_us, entry.encoded())

    def forget(self, message: amqp.Message, delivery_id: str) -> None:
        """Strike what the broker did not take."""
        headers = message.properties.get("application_headers") or {}
        member = member_of(headers, delivery_id)
        if member is not None:
            self._ledger.forget(member)

"""Noting down in the ledger what is about to wait."""

from __future__ import annotations

from functools import cached_property
from time import time_ns

import amqp

from ...message import HEADER, Delayed
from .ledger.entry import Entry, member_of
from .ledger.line import LedgerLine, line_of
from .preparation import Preparation
from .streams.line import StreamLine, stream_line_of
from .streams.notes import Noted


class Recorder:
    """Of one connection; without a ledger it does nothing. Never fails, hardly waits."""

    def __init__(self, delays: Preparation) -> None:
        self._delays = delays
        self._settings = delays.settings

    @property
    def is_on(self) -> bool:
        """Whether there is a ledger."""
        return self._settings.ledger is not None

    @cached_property
    def _line(self) -> LedgerLine | None:
        url, vhost = self._settings.ledger_url, self._delays.connection.virtual_host
        return None if url is None else line_of(url, self._settings.namespace, vhost)

    @cached_property
    def _stream_line(self) -> StreamLine:
        return stream_line_of(self._delays.connection.client, self._settings)

    def record(self, message: amqp.Message, sealed: amqp.Message, delayed: Delayed) -> None:
        """Note down what is about to be sent: a worker may have it soon."""
        if not self.is_on:
            return
        envelope = sealed.properties["application_headers"][HEADER]
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
            envelope.get("expires"),
        )
        replaced = None if delayed.replaces is None else delayed.replaces.delivery_id
        self.note(member, delayed.due_us, entry, replaced=replaced)

    def note(self, member: str, due_us: int, entry: Entry, *, replaced: str | None = None) -> None:
        """The same for what is known already; *replaced* is a delivery id."""
        if self._line is not None:
            self._line.record(member, due_us, entry.encoded())
            return
        stream = self._delays.topology.ledger.for_entry((due_us - time_ns() // 1000) / 1_000_000)
        noted = Noted(member.rpartition(":")[2], due_us, replaced)
        self._stream_line.record(stream, noted, entry.encoded())

    def forget(self, message: amqp.Message, delivery_id: str) -> None:
        """The broker did not take what was noted down; what stands in a stream is due some day."""
        headers = message.properties.get("application_headers") or {}
        member = member_of(headers, delivery_id)
        if self._line is not None and member is not None:
            self._line.forget(member)

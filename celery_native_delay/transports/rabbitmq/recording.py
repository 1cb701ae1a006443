"""Noting down in the ledger what is about to wait."""

from __future__ import annotations

from functools import cached_property
from time import time_ns

import amqp

from ...core.delayed import HEADER
from ...core.topology import Topology
from .ledger.entry import Entry, member_of
from .ledger.line import LedgerLine, line_of
from .streams.notes import Noted, note_message
from .streams.own_writes import own_writes
from .window import Publication


class Recorder:
    """Of one connection; without a ledger it does nothing."""

    def __init__(self, topology: Topology) -> None:
        self._topology = topology
        self._settings = topology.settings

    @cached_property
    def _line(self) -> LedgerLine | None:
        url = self._settings.ledger_url
        return None if url is None else line_of(url, self._settings.namespace)

    def record(
        self,
        message: amqp.Message,
        exchange: str,
        routing_key: str,
        sealed: amqp.Message,
        due_us: int,
        queue: str | None = None,
    ) -> Publication | None:
        """Note down what is about to be sent: a worker may have it soon.

        Returns:
            what is to be published first, where streams keep the ledger.
        """
        if self._settings.ledger is None:
            return None
        envelope = sealed.properties["application_headers"][HEADER]
        headers = message.properties.get("application_headers") or {}
        member = member_of(headers, envelope["id"])
        if member is None:
            return None
        body = message.body
        entry = Entry(
            message.properties,
            body.encode() if isinstance(body, str) else bytes(body),
            exchange,
            routing_key,
            queue,
            envelope.get("expires"),
        ).encoded()
        if self._line is not None:
            self._line.record(member, due_us, entry)
            return None
        own_writes.add()
        streams = self._topology.ledger
        stream = streams.for_entry((due_us - time_ns() // 1000) / 1_000_000)
        replaced = envelope["replaces"][0] if "replaces" in envelope else None
        noted = note_message(Noted(envelope["id"], due_us, replaced), entry)
        return Publication(noted, streams.exchange, stream.name)

    def forget(self, message: amqp.Message, delivery_id: str) -> None:
        """The broker did not take what was noted down; what stands in a stream is due some day."""
        headers = message.properties.get("application_headers") or {}
        member = member_of(headers, delivery_id)
        if self._line is not None and member is not None:
            self._line.forget(member)

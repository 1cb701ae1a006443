"""Moves waiting messages of kombu's brokers and of stores, for ``delay migrate``."""

from __future__ import annotations

import json
from base64 import b64decode
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from time import time_ns
from typing import Any

from kombu.utils.json import dumps

from ...due_time import eta_of, milliseconds_up
from ...errors import CannotDelay, UnsupportedBroker
from ...keyed.records import KeyRecords
from ...message import Delayed, cancel, due_ms_of
from ...records.interface import Change, RecordName, Snapshot
from ...records.publishing import RecordedPublish, publishing
from ...store.entry import StoreEntry
from ...store.interface import WaitingRow
from .. import moving
from ..moving import Found, Moving, Source, Stays, derived_id, expires_ms_of
from .from_store import message_of
from .wrapping import unwrapped

#: A message due within so many microseconds stays, if a process that moves due messages is running.
LEFT_US = 5_000_000
LEFT = Stays("it is due within 5 s where it is", is_error=False)

#: Properties of an envelope that are kombu's and not AMQP's.
_KOMBUS = ("body_encoding", "delivery_info", "delivery_tag")


class VirtualMovingPart(moving.MovingPart):
    """Migrates waiting messages (``delay migrate``) into or out of one of kombu's brokers."""

    def __init__(self, channel: Any) -> None:
        super().__init__(channel)
        store = channel.store
        self.name = channel.connection.client.as_uri() if store is None else store.where

    def prepare(self, queues: Sequence[Any]) -> None:
        if self._channel.store is not None:
            self._channel.store.prepare()
        super().prepare(queues)

    def sources(self, what: str | None) -> list[Source]:
        """Return this broker's waiting messages, if ``delay migrate --from`` is the broker's URL.

        Then *what* is None. If ``--from`` is a name, such as ``broker``, *what* is the name. For
        a name, this method raises UnsupportedBroker: only RabbitMQ has such sources.
        """
        if what is not None and (what != "broker" or self._channel.store is None):
            raise UnsupportedBroker(
                f"--from {what} is about RabbitMQ, and this app's broker is "
                f"{self._channel.connection.client.as_uri()}: give the URL of the one to move from"
            )
        return [self._source()]

    def own_sources(self) -> list[Source]:
        return [self._source()]

    def take_in(self, moving: Moving, keyed: RecordedPublish | None = None) -> bool:
        delayed, channel = moving.delayed, self._channel
        drains = channel.delays.settings.drains
        message = self._message(moving.as_plain() if drains else moving)
        exchange, routing_key = delayed.exchange, delayed.routing_key
        if delayed.queue is not None:
            queues = [delayed.queue]
        elif exchange and channel.typeof(exchange).type == "fanout" and channel.supports_fanout:
            channel._put_fanout(exchange, message, routing_key)
            return not moving.again
        else:
            queues = self._queues(exchange, routing_key)
        is_ahead = channel.due_of(message) is not None
        for queue in queues:
            # A draining app moves its own waiting messages, which are no copies of an earlier run.
            if drains or not (moving.again and self._has(message, queue)):
                # The key's state is written with the last copy: then all copies are published.
                last = keyed if queue == queues[-1] else None
                with nullcontext() if last is None else publishing(last):
                    channel._put(queue, message)
        # While the message is not due, its task id tells that the message is here.
        return not moving.again or (is_ahead and moving.task_id is not None)

    def _has(self, message: dict[str, Any], queue: str) -> bool:
        """Return True if *message* already waits for *queue*; a store takes it once anyway."""
        return False

    def _source(self) -> Source:
        """Return this broker's waiting messages as a :class:`Source`."""
        raise UnsupportedBroker(
            f"{self._channel.connection.client.as_uri()} hands out a waiting message only when it "
            f"is due: its tasks wait there, and later ones in the store"
        )

    def _queues(self, exchange: str, routing_key: str) -> list[str]:
        if not exchange:
            return [routing_key]
        channel = self._channel
        try:
            table = channel.get_table(exchange)
            found = channel.typeof(exchange).lookup(table, exchange, routing_key, None)
        except KeyError:  # kombu's memory knows no such exchange
            found = []
        if queues := sorted({queue for queue in found if queue}):
            return queues
        raise CannotDelay(
            f"no queue is bound to the exchange {exchange!r} with the routing key {routing_key!r}: "
            f"name it in task_queues"
        )

    def _message(self, moving: Moving) -> dict[str, Any]:
        """Encode a moved message for kombu; a rescheduled message gets its new due time as ETA."""
        properties, delayed, channel = dict(moving.properties), moving.delayed, self._channel
        headers = dict(moving.headers)
        if delayed.cancelled:
            cancel(headers, {})
        elif due_ms_of(headers) != milliseconds_up(delayed.due_us):
            headers["eta"] = eta_of(delayed.due_us)
        properties.pop("application_headers", None)
        message: dict[str, Any] = channel.prepare_message(
            moving.body,
            content_type=properties.pop("content_type", None),
            content_encoding=properties.pop("content_encoding", None),
            headers=headers,
            properties=properties,
        )
        channel._inplace_augment_message(message, delayed.exchange, delayed.routing_key)
        message["properties"]["delivery_tag"] = delayed.delivery_id
        return message


def moving_of(envelope: str | bytes, *, queue: str, due_us: int) -> Moving:
    """Decode a waiting message; *envelope* is kombu's message as JSON."""
    message = json.loads(envelope)
    headers, properties = message.get("headers") or {}, message["properties"]
    opened, known = unwrapped(headers, properties)
    body = message["body"]
    if properties.get("body_encoding") == "base64":
        raw = b64decode(body)
    else:
        raw = str(body).encode(message.get("content-encoding") or "utf-8")
    own = {
        "content_type": message.get("content-type"),
        "content_encoding": message.get("content-encoding"),
        "application_headers": opened,
        **{name: value for name, value in properties.items() if name not in _KOMBUS},
    }
    own = {name: value for name, value in own.items() if value is not None}
    info = properties.get("delivery_info") or {}
    exchange, routing_key = info.get("exchange") or "", info.get("routing_key") or ""
    tag = str(properties.get("delivery_tag"))
    delayed = Delayed(
        derived_id(opened, own, raw, exchange, routing_key, queue) or tag.replace("-", ""),
        due_us,
        exchange,
        routing_key,
        queue or None,
        expires_ms_of(own, now_us=time_ns() // 1000),
        cancelled=known is not None and known.cancelled,
    )
    return Moving(raw, own, delayed)


#: Rows that one query reads.
_AT_ONCE = 500

#: The state that names the row which is being moved, and for how long it is kept, in microseconds.
#: If a move is killed, the next one knows that the destination may have this row's message.
_MOVING = RecordName("lease", "moving")
_KEPT_US = 30 * 86_400_000_000


class StoreSource(Source):
    """Takes the waiting tasks out of a store, earliest due time first."""

    keeps_keys = False

    def __init__(self, store: Any, name: str = "") -> None:
        """*store* is a ``Store``, or the waiting messages of a Redis broker."""
        self.name = name or f"{store.where} ({store.namespace})"
        self._store = store
        self._last: tuple[object, str] | None = None
        self._is_moving = False

    def key_records(self) -> KeyRecords:
        return KeyRecords(self._store.state)

    def count(self) -> int:
        waiting: int = self._store.census().waiting
        return waiting

    def found(self) -> Iterator[Found]:
        store, census = self._store, self._store.census()
        interrupted = store.state.read(_MOVING).text
        after, left = None, census.waiting
        while left > 0:
            rows = store.rows_after(after, limit=min(_AT_ONCE, left))
            if not rows:
                return
            now_us = store.now_us()
            for row in rows:
                after, left = row, left - 1
                if census.promoting and row.next_us < now_us + LEFT_US:
                    yield LEFT
                    continue
                self._last = row.key, row.entry
                name, moving = self._read(row)
                self._note(name)
                yield replace(moving, again=name == interrupted)

    def _read(self, row: WaitingRow) -> tuple[str, Moving]:
        """Return the name of a row, and its message."""
        entry = StoreEntry.decoded(row.entry)
        return entry.name, moving_of_entry(entry)

    def done(self) -> bool:
        assert self._last is not None
        is_gone: bool = self._store.remove(*self._last)
        self._is_moving = False
        return is_gone

    def close(self) -> None:
        if self._last is not None and not self._is_moving:
            self._note(None)

    def _note(self, name: str | None) -> None:
        def noted(seen: Snapshot) -> Change[None]:
            return Change(name, seen.now_us + _KEPT_US, None)

        self._store.state.change(_MOVING, noted)
        self._is_moving = name is not None


def moving_of_entry(entry: StoreEntry) -> Moving:
    """Convert an entry, of RabbitMQ or of a kombu channel, to a message that can be moved."""
    if "delivery_tag" in entry.properties:  # of kombu's virtual transports
        return moving_of(dumps(message_of(entry)), queue=entry.queue or "", due_us=entry.due_us)
    delayed = Delayed(
        entry.delivery_id,
        entry.due_us,
        entry.exchange,
        entry.routing_key,
        entry.queue,
        entry.expires_ms,
        entry.cancelled,
    )
    return Moving(entry.body, entry.properties, delayed)

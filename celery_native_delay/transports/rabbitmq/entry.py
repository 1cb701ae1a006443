"""Store copies of waiting messages in Redis or a database."""

from __future__ import annotations

from base64 import b64decode, b64encode
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from json import JSONDecoder
from typing import Any

import amqp
from kombu.utils.json import JSONEncoder, loads

from ...due_time import eta_of
from ...keyed.record import key_and_kind
from ...message import HEADER, Delayed
from ...records.interface import Index, IndexEntry
from ...records.waiting import Waiting
from ..recorded import member_of

#: kombu's dumps() makes a new encoder for each call, and takes three times as long.
_as_json: Callable[[Any], str] = JSONEncoder(separators=(",", ":")).encode
#: A body that begins so is stored in base64. "" is an empty body, or a body that is not UTF-8.
_IN_BASE64 = ("", "=")

_plain_json: Callable[[str], Any] = JSONDecoder().decode


@dataclass(frozen=True)
class Entry:
    """A stored copy of a waiting message, in Redis or a database."""

    properties: Mapping[str, Any]
    body: bytes
    exchange: str
    routing_key: str
    #: The only queue for the message; None for all bound queues.
    queue: str | None = None
    #: The end of the message's expiration, in milliseconds since the epoch.
    expires_ms: int | None = None

    @property
    def headers(self) -> Mapping[str, Any]:
        return self.properties.get("application_headers") or {}

    def encoded(self) -> str:
        """Encode the message as text: one line of JSON, then the body."""
        known = [self.exchange, self.routing_key, self.queue, self.expires_ms, self.properties]
        try:
            body = self.body.decode()
        except UnicodeDecodeError:
            body = ""
        if body[:1] in _IN_BASE64 or "\0" in body:  # PostgreSQL's text cannot hold a NUL
            body = f"={b64encode(self.body).decode()}"
        return f"{_as_json(known)}\n{body}"

    @classmethod
    def decoded(cls, text: str) -> Entry:
        line, _, body = text.partition("\n")
        exchange, routing_key, queue, expires_ms, properties = loads(line)
        data = b64decode(body[1:]) if body.startswith("=") else body.encode()
        return cls(properties, data, exchange, routing_key, queue, expires_ms)


def waiting(member: str, text: str, due_us: int) -> Waiting:
    """Decode the properties in a stored message; *member* ends with the delivery id.

    *text* is the stored message. Its body is not decoded.
    """
    known = _plain_json(text[: text.index("\n")])
    exchange, routing_key, queue, _, properties = known
    headers = properties.get("application_headers") or {}
    key, kind = key_and_kind(headers)
    return Waiting.of(
        headers,
        properties,
        # In the default exchange, the routing key is the queue's name.
        queue=queue or ("" if exchange else routing_key),
        exchange=exchange,
        routing_key=routing_key,
        due_us=due_us,
        delivery_id=member.rpartition(":")[2],
        key=key,
        kind=kind,
    )


def record(records: Index, message: amqp.Message, wrapped: amqp.Message, delayed: Delayed) -> None:
    """Store a copy of *message* in *records*; *wrapped* is this message with our header."""
    header = wrapped.properties["application_headers"][HEADER]
    headers = message.properties.get("application_headers") or {}
    member = member_of(headers, delayed.delivery_id)
    if member is None:
        return
    entry = Entry(
        message.properties,
        bytes(message.body),
        delayed.exchange,
        delayed.routing_key,
        delayed.queue,
        header.get("expires"),
    )
    records.note(IndexEntry(member, delayed.due_us, entry.encoded()))


def forget(records: Index, headers: Mapping[str, Any], delivery_id: str) -> None:
    """Delete the stored copy of a message that the broker refused."""
    member = member_of(headers, delivery_id)
    if member is not None:
        records.forget(member)


class Republisher:
    """Publishes a waiting message again from the stored copy."""

    def __init__(self, delays: Any) -> None:
        self._delays = delays
        self.check_reach = delays.check_reach

    def waiting(self, member: str, entry: str, due_us: int) -> Waiting:
        return waiting(member, entry, due_us)

    def publish_again(self, entry: str, due_us: int, delivery_id: str, *, cancelled: bool) -> str:
        """Publish a stored message with a new due time; return the new message as text.

        If *cancelled* is True, the worker that receives the new message revokes the task.
        """
        before = Entry.decoded(entry)
        headers = {**before.headers, "eta": eta_of(due_us)}
        again = replace(before, properties={**before.properties, "application_headers": headers})
        where = again.exchange, again.routing_key, again.queue, again.expires_ms
        self._delays.put_back(
            amqp.Message(again.body, **again.properties),
            Delayed(delivery_id, due_us, *where, cancelled),
            recorded=False,
        )
        return again.encoded()

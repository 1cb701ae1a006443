"""Entries of the records: all of a message that is needed to publish it again. Pure."""

from __future__ import annotations

from base64 import b64decode, b64encode
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from json import JSONDecoder
from typing import Any

from kombu.utils.json import JSONEncoder, loads

from ...due_time import eta_of
from ...keyed.record import key_and_kind
from ...message import Delayed
from ...records.waiting import Waiting

#: kombu's dumps() makes an encoder for each call, which takes three times as long.
_as_json: Callable[[Any], str] = JSONEncoder(separators=(",", ":")).encode
#: Beginnings of a body that is written in base64; "" stands for what is no text.
_IN_BASE64 = ("", "=")

_plain_json: Callable[[str], Any] = JSONDecoder().decode


@dataclass(frozen=True)
class Entry:
    """A message as it was published, before it was wrapped.

    *queue* is the one queue it is for, None for all that *exchange* leads to. *expires_ms* is when
    its ``expiration`` is over, in milliseconds since the epoch.
    """

    properties: Mapping[str, Any]
    body: bytes
    exchange: str
    routing_key: str
    queue: str | None = None
    expires_ms: int | None = None

    @property
    def headers(self) -> Mapping[str, Any]:
        """The user's headers."""
        return self.properties.get("application_headers") or {}

    def encoded(self) -> str:
        """One line of JSON, then the body: as it is if it is text, else ``=`` and base64."""
        known = [self.exchange, self.routing_key, self.queue, self.expires_ms, self.properties]
        try:
            body = self.body.decode()
        except UnicodeDecodeError:
            body = ""
        if body[:1] in _IN_BASE64 or "\0" in body:  # which PostgreSQL's text cannot hold
            body = f"={b64encode(self.body).decode()}"
        return f"{_as_json(known)}\n{body}"

    def wait(self, delivery_id: str, due_us: int, *, cancelled: bool) -> Delayed:
        """The wait of a copy that is sent in its stead."""
        return Delayed(
            delivery_id,
            due_us,
            self.exchange,
            self.routing_key,
            self.queue,
            self.expires_ms,
            cancelled,
        )

    @classmethod
    def decoded(cls, text: str) -> Entry:
        """The opposite of :meth:`encoded`."""
        line, _, body = text.partition("\n")
        exchange, routing_key, queue, expires_ms, properties = loads(line)
        data = b64decode(body[1:]) if body.startswith("=") else body.encode()
        return cls(properties, data, exchange, routing_key, queue, expires_ms)


def waiting(member: str, text: str, due_us: int) -> Waiting:
    """The task of an entry as people see it, for which body and objects need not be made."""
    known = _plain_json(text[: text.index("\n")])
    exchange, routing_key, queue, _, properties = known
    headers = properties.get("application_headers") or {}
    key, kind = key_and_kind(headers)
    return Waiting.of(
        headers,
        properties,
        # Of the default exchange, the routing key is the queue's name.
        queue=queue or ("" if exchange else routing_key),
        exchange=exchange,
        routing_key=routing_key,
        due_us=due_us,
        delivery_id=member.rpartition(":")[2],
        key=key,
        kind=kind,
    )


def due_then(entry: Entry, due_us: int) -> Entry:
    """*entry*, due at another time; its ``expiration`` ends when it did."""
    headers = {**entry.headers, "eta": eta_of(due_us)}
    return replace(entry, properties={**entry.properties, "application_headers": headers})

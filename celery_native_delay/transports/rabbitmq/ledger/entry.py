"""Entries of a ledger: all of a message that is needed to send it again. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from json import JSONDecoder
from typing import Any

from kombu.utils.json import JSONEncoder, loads

from ....ledger.model import Waiting
from ....message import Delayed
from ....texts import is_text

#: kombu's dumps() makes an encoder for each call, which takes three times as long.
_as_json: Callable[[Any], str] = JSONEncoder(separators=(",", ":")).encode
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

    def encoded(self) -> bytes:
        """One line of JSON, then the body as it is."""
        known = [self.exchange, self.routing_key, self.queue, self.expires_ms, self.properties]
        return _as_json(known).encode() + b"\n" + self.body

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
    def decoded(cls, data: bytes) -> Entry:
        """The opposite of :meth:`encoded`."""
        line, _, body = data.partition(b"\n")
        exchange, routing_key, queue, expires_ms, properties = loads(line)
        return cls(properties, body, exchange, routing_key, queue, expires_ms)


def waiting(member: str, data: bytes, due_us: int) -> Waiting:
    """The task of an entry as people see it, for which body and objects need not be made."""
    known = _plain_json(data[: data.index(b"\n")].decode())
    exchange, routing_key, queue, _, properties = known
    return Waiting.of(
        properties.get("application_headers") or {},
        properties,
        # Of the default exchange, the routing key is the queue's name.
        queue=queue or ("" if exchange else routing_key),
        exchange=exchange,
        routing_key=routing_key,
        due_us=due_us,
        delivery_id=member.rpartition(":")[2],
    )


def member_of(headers: Mapping[str, Any], delivery_id: str) -> str | None:
    """The name of a task's entry; None for a message that is no Celery task of protocol 2.

    Other consumers of delayed messages ask no ledger.
    """
    task_id = headers.get("id")
    if "task" not in headers or not task_id or not is_text(task_id):
        return None
    return f"{task_id}:{delivery_id}"

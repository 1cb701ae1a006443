"""What SQS is given: a message as kombu would send it, and the entry of one that waits. Pure.

A delay queue is read by relays alone. An entry is one line of JSON that says where the message is
on its way, a newline, and the body that the destination will get: no hop reads or writes it anew.
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Self

from kombu.utils.json import dumps, loads

from ...core.errors import CannotDelay

VERSION = 1

#: Bytes of a body with its attributes that SQS takes, for one message or all of a batch: 1 MiB
#: since 2025; a queue may be set to less.
MOST_BYTES = 1_048_576

#: By so much the numbers of an entry may grow until its last hop.
_GROWTH_BYTES = 16

#: kombu keeps these out of the body: ``kombu.transport.SQS.Channel._put``.
_ATTRIBUTES = "message_attributes"


@dataclass(frozen=True)
class Parcel:
    """A message as ``send_message`` takes it; *group_id* is for fair queues."""

    body: str
    attributes: Mapping[str, Any] = field(default_factory=dict)
    group_id: str | None = None

    @classmethod
    def of(cls, message: Mapping[str, Any], *, base64: bool) -> Self:
        """kombu's *message*, as kombu would send it; *base64* is its ``sqs_base64_encoding``."""
        properties = dict(message["properties"])
        attributes = properties.pop(_ATTRIBUTES, None) or {}
        text = dumps({**message, "properties": properties})
        body = b64encode(text.encode()).decode() if base64 else text
        return cls(body, attributes, properties.get("MessageGroupId"))

    @property
    def size_bytes(self) -> int:
        """What SQS counts."""
        return len(self.body.encode()) + sum(
            len(name.encode()) + sum(len(_bytes(part)) for part in value.values())
            for name, value in self.attributes.items()
        )

    def arguments(self) -> dict[str, Any]:
        """Arguments of ``send_message`` to a queue that is no FIFO queue."""
        found: dict[str, Any] = {"MessageBody": self.body}
        if self.attributes:
            found["MessageAttributes"] = self.attributes
        if self.group_id is not None:
            found["MessageGroupId"] = self.group_id
        return found


@dataclass(frozen=True)
class Entry:
    """A message in a delay queue.

    *left_ms* is what was left of its delay, in milliseconds, when it was sent to its *hop*, which
    are counted from 0; *due_ms* is Unix time in milliseconds and only tells people.
    """

    id: str
    left_ms: int
    due_ms: int
    parcel: Parcel
    hop: int = 0

    def again(self, left_ms: int) -> Entry:
        """The same on its next hop."""
        return replace(self, left_ms=left_ms, hop=self.hop + 1)

    def text(self) -> str:
        """The body in the delay queue."""
        parcel = asdict(self.parcel)
        body = parcel.pop("body")
        head = {"v": VERSION, "id": self.id, "left": self.left_ms, "due": self.due_ms}
        head |= {"hop": self.hop} | {name: value for name, value in parcel.items() if value}
        return f"{dumps(head)}\n{body}"

    @property
    def size_bytes(self) -> int:
        """The most that SQS counts on any hop and at the destination."""
        return max(len(self.text().encode()) + _GROWTH_BYTES, self.parcel.size_bytes)

    def arguments(self) -> dict[str, Any]:
        """Arguments of ``send_message`` to the delay queue.

        A group of its own: no message waits for another. The deduplication id names the hop: who
        repeats a send within five minutes, because the relay before it died, changes nothing.
        """
        return {
            "MessageBody": self.text(),
            "MessageGroupId": self.id,
            "MessageDeduplicationId": f"{self.id}:{self.hop}",
        }


def opened(text: str) -> Entry:
    """The opposite of :meth:`Entry.text`.

    Raises:
        ValueError: it is none of ours.
    """
    head, newline, body = text.partition("\n")
    found = loads(head) if newline else None
    if not isinstance(found, dict) or found.get("v") != VERSION:
        raise ValueError("expected a message that celery_native_delay sent")
    try:
        parcel = Parcel(body, found.get("attributes") or {}, found.get("group_id"))
        return Entry(found["id"], found["left"], found["due"], parcel, found["hop"])
    except KeyError as exc:
        raise ValueError(f"expected a message with its {exc}") from exc


def check_size(size_bytes: int, *, queue: str, most_bytes: int = MOST_BYTES) -> None:
    """Refuse what SQS would; a queue may take less than others.

    Raises:
        CannotDelay: naming size and limit.
    """
    if size_bytes > most_bytes:
        raise CannotDelay(
            f"expected a message of at most {most_bytes:,} bytes, all that SQS takes there, "
            f"got {size_bytes:,} for {queue!r}: send a reference to what is large, or compress it"
        )


def _bytes(part: Any) -> bytes:
    return part if isinstance(part, bytes) else str(part).encode()

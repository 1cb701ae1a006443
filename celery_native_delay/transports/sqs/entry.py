"""Encode messages for SQS queues and SQS delay queues. This module does no I/O.

The body of a message in a delay queue begins with a line of JSON. This line holds the remaining
delay, the due time, kombu's delivery tag, and the SQS message attributes for the destination queue.
The rest is the body for the destination queue. Only this package reads the delay queues.
"""

from __future__ import annotations

import re
from base64 import b64decode, b64encode
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, NamedTuple, Self, TypeVar

from kombu.utils.json import dumps, loads

from ...due_time import milliseconds_up
from ...errors import CannotDelay
from ...message import TENANT
from ...texts import digest_of
from ..virtual.wrapping import encoded
from . import hops

T = TypeVar("T")

VERSION = 1

#: The largest message, or batch of messages, in bytes: 1 MiB since 2025. A queue may accept less.
MOST_BYTES = 1_048_576

#: By how many bytes the numbers in an entry may grow until its last wait.
_GROWTH_BYTES = 16

#: A property that kombu sends outside the body, in ``kombu.transport.SQS.Channel._put``.
_ATTRIBUTES = "message_attributes"


#: The text of a message group.
_GROUP = re.compile(r"[!-~]{1,128}")


def group_of(message: Mapping[str, Any]) -> str | None:
    """Return the message group of kombu's *message*: the user's, or its tenant; None without one.

    Standard queues are fair between the groups.
    https://docs.aws.amazon.com/AWSSimpleQueueService/latest/SQSDeveloperGuide/sqs-fair-queues.html
    """
    given = message["properties"].get("MessageGroupId")
    tenant = (message.get("headers") or {}).get(TENANT)
    if given is not None or not tenant:
        return None if given is None else str(given)
    return tenant if _GROUP.fullmatch(tenant) else digest_of(tenant)


@dataclass(frozen=True)
class Payload:
    """The body and the attributes of an SQS message."""

    body: str
    attributes: Mapping[str, Any] = field(default_factory=dict)
    group_id: str | None = None  # the message group of a fair queue

    @classmethod
    def of(cls, message: Mapping[str, Any], *, base64: bool) -> Self:
        """Encode kombu's *message* as an SQS message, with a Base64 body if *base64* is True."""
        properties = dict(message["properties"])
        attributes = properties.pop(_ATTRIBUTES, None) or {}
        text = encoded({**message, "properties": properties})
        return cls("", attributes, group_of(message)).holding(text, base64=base64)

    def holding(self, text: str, *, base64: bool) -> Self:
        """Return a copy of this SQS message with the body *text*, in Base64 if *base64* is True."""
        return replace(self, body=b64encode(text.encode()).decode() if base64 else text)

    @property
    def size_bytes(self) -> int:
        """Return the size of the message in bytes; SQS counts the body and the attributes."""
        return len(self.body.encode()) + sum(
            len(name.encode()) + sum(len(_bytes(part)) for part in value.values())
            for name, value in self.attributes.items()
        )

    def arguments(self) -> dict[str, Any]:
        """Return the arguments of boto's ``send_message`` to a standard queue."""
        found: dict[str, Any] = {"MessageBody": self.body}
        if self.attributes:
            found["MessageAttributes"] = self.attributes
        if self.group_id is not None:
            found["MessageGroupId"] = self.group_id
        return found


@dataclass(frozen=True)
class SqsEntry:
    """A message in a delay queue, for a delay over 15 minutes."""

    id: str
    left_ms: int  # the remaining delay when the present wait begins
    due_ms: int  # only for people
    payload: Payload
    hop: int = 0  # the number of earlier waits in the delay queue

    def again(self, left_ms: int) -> SqsEntry:
        """Return a copy of this message with the remaining delay *left_ms*."""
        return replace(self, left_ms=left_ms, hop=self.hop + 1)

    def text(self) -> str:
        """Return the body of the message in the delay queue."""
        payload = asdict(self.payload)
        body = payload.pop("body")
        head = {"v": VERSION, "id": self.id, "left": self.left_ms, "due": self.due_ms}
        head |= {"hop": self.hop} | {name: value for name, value in payload.items() if value}
        return f"{dumps(head)}\n{body}"

    @property
    def size_bytes(self) -> int:
        """Return the size (bytes) in the delay queue or destination queue, whichever is larger."""
        return max(len(self.text().encode()) + _GROWTH_BYTES, self.payload.size_bytes)

    def arguments(self) -> dict[str, Any]:
        """Return the arguments of boto's ``send_message`` to the delay queue."""
        return {
            "MessageBody": self.text(),
            "MessageGroupId": self.id,  # one group per message, so no message blocks another
            # Within five minutes, SQS ignores a repeated send for the same wait.
            "MessageDeduplicationId": f"{self.id}:{self.hop}",
        }


class SqsMessage(NamedTuple):
    """A delayed message: its destination queue, due time, id and :class:`Payload`."""

    queue: str
    due_us: int
    id: str
    payload: Payload
    base64: bool  # kombu's ``sqs_base64_encoding``

    @property
    def envelope(self) -> str:
        """Return kombu's message as JSON."""
        body = self.payload.body
        return b64decode(body).decode() if self.base64 else body

    @property
    def size_bytes(self) -> int:
        return len(self.payload.body)

    def another(self, envelope: str, *, due_us: int, task_id: str, delivery_tag: str) -> Self:
        payload = self.payload.holding(envelope, base64=self.base64)
        return self.__class__(self.queue, due_us, delivery_tag, payload, self.base64)

    def wait_ms(self, *, now_us: int) -> int:
        return milliseconds_up(self.due_us - now_us)

    def is_far(self, *, now_us: int) -> bool:
        """Return True if the delay is longer than 15 minutes."""
        return hops.seconds_up(self.wait_ms(now_us=now_us)) > hops.HOP_SECONDS

    def seconds_here(self, *, now_us: int) -> int:
        """Return the ``DelaySeconds`` for a send to the destination queue: at most 900."""
        return min(hops.seconds_up(self.wait_ms(now_us=now_us)), hops.HOP_SECONDS)

    def entry(self, *, now_us: int) -> SqsEntry:
        wait_ms = self.wait_ms(now_us=now_us)
        return SqsEntry(self.id, wait_ms, milliseconds_up(self.due_us), self.payload)


def opened(text: str) -> SqsEntry:
    """Decode a delay queue's message body; raise ValueError if this package did not send it."""
    head, newline, body = text.partition("\n")
    found = loads(head) if newline else None
    if not isinstance(found, dict) or found.get("v") != VERSION:
        raise ValueError("expected a message that celery_native_delay sent")
    try:
        payload = Payload(body, found.get("attributes") or {}, found.get("group_id"))
        return SqsEntry(found["id"], found["left"], found["due"], payload, found["hop"])
    except KeyError as exc:
        raise ValueError(f"expected a message with its {exc}") from exc


def check_size(size_bytes: int, *, queue: str, most_bytes: int = MOST_BYTES) -> None:
    """Raise CannotDelay if a message is larger than *queue* accepts."""
    if size_bytes > most_bytes:
        raise CannotDelay(
            f"expected a message of at most {most_bytes:,} bytes, all that SQS takes there, "
            f"got {size_bytes:,} for {queue!r}: send a reference to what is large, or compress it"
        )


def in_requests(items: Iterable[T], size_bytes: Callable[[T], int]) -> Iterator[list[T]]:
    """Split *items* into requests of up to ten items, within the size limit of SQS."""
    batch: list[T] = []
    batch_bytes = 0
    for each in items:
        its_bytes = size_bytes(each)
        if batch and (len(batch) == hops.BATCH or batch_bytes + its_bytes > MOST_BYTES):
            yield batch
            batch, batch_bytes = [], 0
        batch.append(each)
        batch_bytes += its_bytes
    if batch:
        yield batch


def _bytes(part: Any) -> bytes:
    return part if isinstance(part, bytes) else str(part).encode()

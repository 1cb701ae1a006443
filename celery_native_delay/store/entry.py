"""The message of a task that waits in a store, as text. No I/O.

Increase VERSION when the text changes, because tasks wait for years.
"""

from __future__ import annotations

from base64 import b64decode, b64encode
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from json import JSONDecoder
from typing import Any

from kombu.utils.json import JSONEncoder, loads

from ..due_time import eta_of, milliseconds_up
from ..errors import CannotDelay
from ..keyed.record import key_and_kind
from ..message import HEADER, Delayed, cancel, due_ms_of
from ..records.waiting import HELD, Edit, Waiting, number_of
from ..texts import digest_of, storable

VERSION = 1

#: Says why a message cannot be rescheduled.
NO_TASK = (
    "expected a task of protocol 2, whose ETA is in its headers: only such can be rescheduled, "
    "others can be cancelled"
)

#: kombu's dumps() makes a new encoder for each call, and takes three times as long.
_as_json: Callable[[Any], str] = JSONEncoder(separators=(",", ":")).encode
_plain_json: Callable[[str], Any] = JSONDecoder().decode

#: A body that begins so is stored in base64. "" is an empty body, or a body that is not UTF-8.
_IN_BASE64 = ("", "=")


@dataclass(frozen=True)
class StoreEntry:
    """A message as its producer published it, and the due time at which it is published again.

    - *due_us*: the due time in microseconds since the epoch.
    - *properties*: the AMQP properties, with the headers in ``application_headers``.
    - *queue*: the only queue that gets the message; None if *exchange* routes it.
    - *expires_ms*: the end of the property ``expiration``, in milliseconds since the epoch.
    - *cancelled*: True if no worker may run the task; a worker announces it as revoked.
    """

    due_us: int
    exchange: str
    routing_key: str
    properties: Mapping[str, Any]
    body: bytes
    delivery_id: str
    queue: str | None = None
    expires_ms: int | None = None
    cancelled: bool = False

    @property
    def headers(self) -> Mapping[str, Any]:
        return self.properties.get("application_headers") or {}

    @property
    def is_task(self) -> bool:
        """True for a task of protocol 2, whose name and id are in the headers."""
        headers = self.headers
        return "task" in headers and isinstance(headers.get("id"), str)

    @property
    def task_id(self) -> str:
        """The task id, or the correlation id or delivery id of another message."""
        found = self.headers.get("id") or self.properties.get("correlation_id")
        return storable(str(found or self.delivery_id))

    @property
    def name(self) -> str:
        """The name of the row: the same task and retry is in a store once, however often sent."""
        retries = number_of(self.headers.get("retries"))
        return self.name_of(self.task_id, retries if self.is_task else self.delivery_id)

    def name_of(self, task_id: str, number: int | str = 0) -> str:
        """Return the name of another task's row, for the same queue; *number* is its retry."""
        one = f"{storable(task_id)}:{number}"
        return one if self.queue is None else f"{one}@{digest_of(self.queue)}"

    def encoded(self) -> str:
        """Encode the entry as text: one line of JSON, then the body."""
        known = [
            VERSION,
            self.due_us,
            self.exchange,
            self.routing_key,
            self.queue,
            self.expires_ms,
            self.delivery_id,
            self.cancelled,
            self.properties,
        ]
        try:
            body = self.body.decode()
        except UnicodeDecodeError:
            body = ""
        if body[:1] in _IN_BASE64 or "\0" in body:  # PostgreSQL's text cannot hold a NUL
            body = f"={b64encode(self.body).decode()}"
        return f"{_as_json(known)}\n{body}"

    @classmethod
    def decoded(cls, text: str) -> StoreEntry:
        """Decode the text; raises ValueError if a later release of this package wrote it."""
        line, _, body = text.partition("\n")
        version, *fields = loads(line)
        if version != VERSION:
            raise ValueError(f"expected version {VERSION} of its text, got {version}")
        due_us, exchange, key, queue, expires_ms, delivery_id, cancelled, known = fields
        data = b64decode(body[1:]) if body.startswith("=") else body.encode()
        return cls(
            due_us, exchange, key, known, data, delivery_id, queue, expires_ms, bool(cancelled)
        )

    def due_at(self, due_us: int) -> StoreEntry:
        """Return the entry with another due time, which is also its ETA: no hold delays it."""
        headers = {**self.headers, "eta": eta_of(due_us)}
        if due_us != self.due_us:
            headers.pop(HELD, None)
        properties = {**self.properties, "application_headers": headers}
        return replace(self, due_us=due_us, properties=properties)

    def moved(self, due_us: int) -> StoreEntry:
        """Return the entry with another due time, for a caller who reschedules the task.

        Raises CannotDelay if the message is not a task of protocol 2.
        """
        if not self.is_task:
            raise CannotDelay(NO_TASK)
        return self.due_at(due_us)

    def changed(self, due_us: int, *, cancelled: bool) -> StoreEntry | None:
        """Return the entry with another due time, or of a cancelled task, which a worker announces.

        Returns None for another message that is cancelled, as no consumer would know the mark.
        """
        if cancelled and not self.is_task:
            return None
        return replace(self.moved(due_us), cancelled=cancelled)

    def told(self) -> dict[str, Any]:
        """Return the properties to publish at the due time, with this package's header."""
        properties = dict(self.properties)
        headers = dict(self.headers)
        headers.pop(HEADER, None)
        kept: dict[str, Any] = {}
        due_ms = milliseconds_up(self.due_us)
        if "eta" in headers and (eta_ms := due_ms_of(headers)) != due_ms:
            kept["eta"] = eta_ms
        expiration = properties.pop("expiration", None)
        if expiration is not None and self.expires_ms is not None:
            kept |= {"expiration": expiration, "expires": self.expires_ms}
        header = self._delayed.header(kept)
        if self.cancelled:
            cancel(headers, header)
        headers[HEADER] = header
        properties["application_headers"] = headers
        return properties

    @property
    def _delayed(self) -> Delayed:
        where = self.exchange, self.routing_key, self.queue
        return Delayed(self.delivery_id, self.due_us, *where, stored=True)


def changed_text(text: str, due_us: int, edit: Edit | None, *, cancelled: bool) -> str:
    """Return the text of a cancelled, rescheduled or edited entry; "" to remove its row."""
    entry = StoreEntry.decoded(text)
    new = (entry if edit is None else edit(entry)).changed(due_us, cancelled=cancelled)
    return "" if new is None else new.encoded()


def waiting_of(text: str) -> Waiting | None:
    """Decode a waiting task, without its body.

    Returns None for a cancelled task, and for a row of a later release.
    """
    version, *fields = _plain_json(text[: text.index("\n")])
    if version != VERSION:
        return None
    due_us, exchange, routing_key, queue, _, delivery_id, cancelled, properties = fields
    if cancelled:
        return None
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
        delivery_id=delivery_id,
        key=key,
        kind=kind,
    )

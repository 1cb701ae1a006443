"""Write many tasks into a store: rows in batches, most of them made from a template."""

from __future__ import annotations

from base64 import b64decode
from collections.abc import Mapping, Sequence
from typing import Any

from ..errors import CannotDelay, RefusedMessage
from ..store.entry import StoreEntry
from ..store.interface import Row, Store
from ..store.joined import outside_transaction
from .bulk_publisher import JsonTemplate, RandomIds, TaskTemplate, TaskValues, marked
from .outbox import OutboxBatch

_TOO_LATE = (
    "the transaction in which it was sent has ended: expected `with bulk(app)` within the "
    "transaction"
)


class StoredMessage:
    """A task to write into the store; *joined* if it was sent in the user's transaction."""

    def __init__(self, row: Row, *, joined: bool) -> None:
        self.row = row
        self.joined = joined

    @property
    def due_us(self) -> int:
        return self.row.due_us

    @property
    def size_bytes(self) -> int:
        return len(self.row.entry)

    def encode(self, *_: int) -> None:
        """Do nothing: a row is text already."""

    def refused(self, reason: str) -> RefusedMessage:
        entry = StoreEntry.decoded(self.row.entry)
        where = entry.exchange, entry.routing_key
        return RefusedMessage(reason, *where, entry.headers, entry.body, entry.delivery_id)


class StoredBatch(OutboxBatch[Any]):
    """Rows that are written together."""


def packed(puts: Sequence[Any]) -> tuple[list[StoredBatch], list[Any]]:
    """Divide messages into batches for the store, and the other messages."""
    rows = [put for put in puts if isinstance(put, StoredMessage)]
    others = [put for put in puts if not isinstance(put, StoredMessage)]
    return [StoredBatch(rows)] if rows else [], others


def write(store: Store, puts: Sequence[StoredMessage]) -> dict[str, list[StoredMessage]]:
    """Write messages, and return those that the store refused, by reason.

    It may be repeated: a row of the same name is in the store once. Raises StoreUnavailable if the
    store does not answer.
    """
    refused: dict[str, list[StoredMessage]] = {}
    joined = [put for put in puts if put.joined]
    if joined and store.users() is None:
        refused[_TOO_LATE] = joined
        joined = []
    with outside_transaction():
        _add(store, [put for put in puts if not put.joined], refused)
    _add(store, joined, refused)
    return refused


def _add(
    store: Store, puts: Sequence[StoredMessage], refused: dict[str, list[StoredMessage]]
) -> None:
    try:
        if puts:
            store.add([put.row for put in puts])
    except CannotDelay:  # one bad row must not cost the others
        for put in puts:
            try:
                store.add([put.row])
            except CannotDelay as exc:
                refused.setdefault(str(exc), []).append(put)


class StoredTemplate(JsonTemplate):
    """Makes rows of tasks that have the same destination and options."""

    def __init__(self, entry: StoreEntry) -> None:
        def text(marks: dict[str, str], due_us: int) -> str:
            headers, tag = marked(entry.headers, marks), marks["delivery_id"]
            properties = {**entry.properties, "application_headers": headers}
            properties["correlation_id"] = marks["task_id"]
            if "delivery_tag" in properties:  # of kombu's virtual transports
                properties["delivery_tag"] = tag
            where = entry.exchange, entry.routing_key
            body = marks["body"].encode()
            return StoreEntry(due_us, *where, properties, body, tag, entry.queue).encoded()

        is_base64 = entry.properties.get("body_encoding") == "base64"
        super().__init__(_body_of(entry), text, base64=is_base64)
        self._like = entry

    @classmethod
    def of(cls, message: StoredMessage, channel: Any) -> StoredTemplate | None:
        entry = StoreEntry.decoded(message.row.entry)
        headers = entry.headers
        is_plain = (
            not channel.delays.settings.drains  # whose rows are due at once
            and entry.is_task
            and entry.expires_ms is None
            and entry.properties.get("correlation_id") == headers["id"]
            and not headers.get("retries")
            and isinstance(headers.get("eta"), str)
            and {"argsrepr", "kwargsrepr"} <= headers.keys()
        )
        if not is_plain:
            return None
        template = cls(entry)
        return template if template.makes(message, values_of(entry)) else None

    @staticmethod
    def headers_of(message: StoredMessage) -> Mapping[str, Any]:
        told: Mapping[str, Any] = StoreEntry.decoded(message.row.entry).told()[
            "application_headers"
        ]
        return told

    def makes(self, message: StoredMessage, values: TaskValues) -> bool:
        entry = StoreEntry.decoded(message.row.entry)
        return self._row(entry.due_us, entry.delivery_id, values) == message.row

    def another(
        self, channel: Any, ids: RandomIds, due_us: int, values: TaskValues
    ) -> StoredMessage:
        channel.delays.check_reach(due_us)
        joined = channel.store.users() is not None
        return StoredMessage(self._row(due_us, ids.uuid(), values), joined=joined)

    def _row(self, due_us: int, delivery_id: str, values: TaskValues) -> Row:
        text, task_id = self.filled(values, due_us, delivery_id), values[0]
        return Row(self._like.name_of(task_id), task_id, due_us, text)


def values_of(entry: StoreEntry) -> TaskValues:
    """Return the values by which similar tasks differ."""
    headers = entry.headers
    known = (headers["id"], headers["eta"], headers["argsrepr"], headers["kwargsrepr"])
    return (*known, _body_of(entry))


def _body_of(entry: StoreEntry) -> bytes:
    is_base64 = entry.properties.get("body_encoding") == "base64"
    return b64decode(entry.body) if is_base64 else entry.body


def template_class(theirs: type[TaskTemplate]) -> type[TaskTemplate]:
    """Return a template class for rows of a store, and for the messages of *theirs*."""

    class Template(theirs):  # type: ignore[misc, valid-type]
        @classmethod
        def of(cls, message: Any, channel: Any) -> TaskTemplate | None:
            if isinstance(message, StoredMessage):
                return StoredTemplate.of(message, channel)
            found: TaskTemplate | None = theirs.of(message, channel)
            return found

        @staticmethod
        def headers_of(message: Any) -> Mapping[str, Any]:
            known = StoredTemplate if isinstance(message, StoredMessage) else theirs
            return known.headers_of(message)

    return Template

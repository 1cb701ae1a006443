"""Publish the tasks of a store with a kombu channel when they are due, and make their rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from uuid import uuid4

from billiard.exceptions import SoftTimeLimitExceeded
from kombu.exceptions import OperationalError

from ...errors import described, errors_ignored
from ...message import HEADER
from ...records.publishing import RecordedPublish
from ...store.entry import StoreEntry
from ..interface import Wait, connect_once

#: Headers of kombu's message that are AMQP properties in a row.
_CONTENT = {"content-type": "content_type", "content-encoding": "content_encoding"}


def entry_of(message: Mapping[str, Any], queue: str | None, *, due_us: int) -> StoreEntry:
    """Return the entry of kombu's *message* for *queue*, or for a fanout exchange if it is None."""
    properties = dict(message["properties"])
    info = properties.get("delivery_info") or {}
    properties["application_headers"] = dict(message.get("headers") or {})
    for name, known_as in _CONTENT.items():
        if message.get(name) is not None:
            properties[known_as] = message[name]
    return StoreEntry(
        due_us,
        str(info.get("exchange") or ""),
        str(info.get("routing_key") or ""),
        properties,
        str(message.get("body") or "").encode(),
        str(properties["delivery_tag"]),
        queue,
    )


def entry_of_wait(wait: Wait) -> StoreEntry:
    """Return the entry of a message that a worker received, for the worker's queue only."""
    message = wait.on(wait.message._raw)
    headers = {name: value for name, value in message["headers"].items() if name != HEADER}
    # The worker acknowledges the old delivery tag.
    properties = {**message["properties"], "delivery_tag": str(uuid4())}
    own = {**message, "headers": headers, "properties": properties}
    return entry_of(own, wait.queue, due_us=wait.due_us)


def collected(keyed: RecordedPublish, message: dict[str, Any]) -> dict[str, Any]:
    """Return kombu's *message* with what the messages that it replaces have collected."""
    entry = keyed.collected(entry_of(message, None, due_us=0))
    return {**message, "body": entry.body.decode(), "headers": dict(entry.headers)}


def message_of(entry: StoreEntry) -> dict[str, Any]:
    """Return kombu's message for a due entry, with this package's header."""
    properties = entry.told()
    headers = properties.pop("application_headers")
    message = {"body": entry.body.decode(), "headers": headers, "properties": properties}
    for name, known_as in _CONTENT.items():
        message[name] = properties.pop(known_as, None)
    return message


class ChannelPublisher:
    """Publishes due messages one by one, each to its queue."""

    def __init__(self, connection: Any) -> None:
        """*connection* is a kombu connection, which this object closes."""
        self._connection = connection
        connect_once(connection)
        self._channel = connection.default_channel
        self._lost: tuple[type[Exception], ...] = (
            OSError,
            *connection.connection_errors,
            # kombu's own property would add errors of one channel.
            *getattr(connection.transport, "recoverable_connection_errors", ()),
        )

    def close(self) -> None:
        with errors_ignored():  # the connection is given up anyway
            self._connection.close()

    def publish(self, entries: Sequence[StoreEntry]) -> dict[int, str | None]:
        outcomes: dict[int, str | None] = {}
        for at, entry in enumerate(entries):
            try:
                self._channel.put_due(message_of(entry), entry)
                outcomes[at] = None
            except self._lost as error:
                if not outcomes:
                    raise OperationalError(described(error)) from error
                return outcomes
            except SoftTimeLimitExceeded:  # under the test clock, in a task
                raise
            except Exception as error:  # a transport may raise anything
                outcomes[at] = f"{type(error).__name__}: {error}"
        return outcomes

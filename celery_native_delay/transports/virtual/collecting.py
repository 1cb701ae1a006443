"""Channels that collect kombu's routed and encoded messages for a bulk publisher."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol, Self

from kombu.utils.json import dumps


class CollectedMessage(Protocol):
    """An encoded message that a bulk publisher will send to one queue."""

    @property
    def due_us(self) -> int:
        """Return the due time (µs since the epoch), or 0 for an immediate message."""

    @property
    def envelope(self) -> str | bytes:
        """Return kombu's message as JSON, with this package's header if delayed."""

    @property
    def size_bytes(self) -> int:
        """Return the message's approximate size in bytes."""

    def another(self, envelope: str, *, due_us: int, task_id: str, delivery_tag: str) -> Self:
        """Return a copy of this message with another task's content, id and due time."""


class PlainMessage(NamedTuple):
    """A message in kombu's format, and the message's destination queue."""

    queue: str
    message: dict[str, Any]
    due_us: int = 0

    @property
    def envelope(self) -> str:
        return str(dumps(self.message))

    @property
    def size_bytes(self) -> int:
        return len(self.message.get("body") or "")

    def another(self, envelope: str, *, due_us: int, task_id: str, delivery_tag: str) -> Self:
        raise NotImplementedError("only delayed messages have a template")


class Collecting:
    """A channel mixin that collects messages for a bulk publisher instead of sending."""

    collected: list[Any]
    #: Messages as JSON, for which no queue is bound. kombu would drop these messages.
    returned: list[bytes]
    _is_routed = False

    def put_for(self, queue: str, message: dict[str, Any]) -> Any:
        """Encode *message* for *queue*; the bulk publisher sends the result."""
        raise NotImplementedError

    def put_for_all(
        self, exchange: str, message: dict[str, Any], routing_key: str, *, due_us: int
    ) -> Any:
        """Encode a delayed message for a fanout exchange; the bulk publisher sends the result."""
        raise NotImplementedError

    def put_plainly(self, put: PlainMessage) -> None:
        """Send a message at once with kombu's ``_put``, without collecting the message."""
        message = put.message
        # Some of kombu's transports remove properties that they send elsewhere.
        message = {**message, "properties": dict(message["properties"])}
        super()._put(put.queue, message)  # type: ignore[misc]

    def basic_publish(
        self, message: dict[str, Any], exchange: str, routing_key: str, **kwargs: Any
    ) -> Any:
        self._is_routed = False
        result = super().basic_publish(message, exchange, routing_key, **kwargs)  # type: ignore[misc]
        if not self._is_routed:
            self.returned.append(dumps(message).encode())
        return result

    def _put(self, queue: str, message: dict[str, Any], **_: Any) -> None:
        self._is_routed = True
        self.collected.append(self.put_for(queue, message))

    def _put_fanout(
        self: Any, exchange: str, message: dict[str, Any], routing_key: str, **kwargs: Any
    ) -> None:
        self._is_routed = True
        due_us = self.due_of(message)
        if due_us is None:
            super()._put_fanout(exchange, message, routing_key, **kwargs)  # type: ignore[misc]
        else:
            put = self.put_for_all(exchange, message, routing_key, due_us=due_us)
            self.collected.append(put)

"""Channels that collect what kombu would have them send: routed, with priority and envelope."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol, Self

from kombu.utils.json import dumps


class CollectedMessage(Protocol):
    """A message on its way to one destination."""

    @property
    def due_us(self) -> int:
        """Microseconds since the epoch; 0 for one that does not wait."""

    @property
    def envelope(self) -> str | bytes:
        """kombu's message as JSON, with our header."""

    @property
    def size_bytes(self) -> int:
        """Bytes that it adds to a batch, about."""

    def another(self, envelope: str, *, due_us: int, task_id: str, delivery_tag: str) -> Self:
        """Another one that waits for the same destination."""


class PlainMessage(NamedTuple):
    """A message that goes to *queue* as kombu would have it go."""

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
        raise NotImplementedError("what does not wait is sent the long way")


class Collecting:
    """A channel that collects what kombu would have it send; mixed in before ours.

    *collected* goes somewhere; *returned* are envelopes of messages that no queue is bound for,
    which kombu drops.
    """

    collected: list[Any]
    returned: list[bytes]
    _is_routed = False

    def put_for(self, queue: str, message: dict[str, Any]) -> CollectedMessage:
        """kombu's *message* on its way to *queue*; NativeDelayError if it cannot wait."""
        raise NotImplementedError

    def put_for_all(
        self, exchange: str, message: dict[str, Any], routing_key: str, *, due_us: int
    ) -> CollectedMessage:
        """kombu's *message* on its way to all that listen to *exchange* when it is due."""
        raise NotImplementedError

    def put_plainly(self, put: PlainMessage) -> None:
        """Send by kombu what does not wait; it may be tried again."""
        message = put.message
        # Some of kombu's take out what they have sent elsewhere.
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

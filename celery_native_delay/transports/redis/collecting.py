"""Channels that collect what kombu would have them send: routed, with priority and envelope."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kombu.utils.json import dumps

from .envelope import Destination
from .transport import Channel, SentinelChannel


@dataclass(frozen=True)
class Put:
    """A message on its way to one destination.

    It waits as *member* with *entry*; without a *member* it does not, and *entry* is its envelope.
    """

    destination: Destination
    due_us: int
    member: str
    entry: bytes


class Collecting:
    """A channel that collects what kombu would have it send; mixed in before ours.

    *collected* goes somewhere; *returned* are envelopes of messages that no queue is bound for,
    which kombu drops.
    """

    collected: list[Put]
    returned: list[bytes]
    _is_routed = False

    def basic_publish(
        self, message: dict[str, Any], exchange: str, routing_key: str, **kwargs: Any
    ) -> Any:
        self._is_routed = False
        result = super().basic_publish(message, exchange, routing_key, **kwargs)  # type: ignore[misc]
        if not self._is_routed:
            self.returned.append(dumps(message).encode())
        return result

    def _put(self: Any, queue: str, message: dict[str, Any], **_: Any) -> None:
        self._collect(message, self.destination(queue, message))

    def _put_fanout(
        self: Any, exchange: str, message: dict[str, Any], routing_key: str, **kwargs: Any
    ) -> None:
        self._is_routed = True
        if self.due_of(message) is None:
            super()._put_fanout(exchange, message, routing_key, **kwargs)  # type: ignore[misc]
        else:
            self._collect(message, self.broadcast(exchange, routing_key))

    def _collect(self: Any, message: dict[str, Any], destination: Destination) -> None:
        self._is_routed = True
        due_us = self.due_of(message)
        if due_us is None:
            put = Put(destination, 0, "", dumps(message).encode())
        else:
            put = Put(destination, due_us, *self.delays.stored(message, destination, due_us=due_us))
        self.collected.append(put)


class BulkChannel(Collecting, Channel):
    """See :class:`Collecting`."""


class SentinelBulkChannel(Collecting, SentinelChannel):
    """See :class:`Collecting`."""

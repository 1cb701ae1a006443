"""kombu's pgmq transport, whose broker can delay by itself: its messages are told for how long.

In kombu since 5.7. Delays are whole seconds there, so they are rounded up: never early.
"""

from __future__ import annotations

from time import time_ns
from typing import Any

from kombu.transport import pgmq

from ..core.settings import DelaySettings
from .virtual.channel import DelayingChannel, DelayingTransport


class Channel(pgmq.Channel):  # type: ignore[misc]
    """A channel whose messages with an ETA ahead stay invisible until then."""

    def _pgmq_send_kwargs(self, message: dict[str, Any]) -> dict[str, Any]:
        """What kombu hands to pgmq's ``send`` and ``send_topic``."""
        due_us = DelayingChannel.due_of(message)
        if due_us is not None:
            wait_us = due_us - time_ns() // 1000
            message["properties"]["DelaySeconds"] = max(-(-wait_us // 1_000_000), 1)
        found: dict[str, Any] = super()._pgmq_send_kwargs(message)
        return found


class Transport(DelayingTransport, pgmq.Transport):  # type: ignore[misc]
    """kombu's pgmq transport; with the ``native_delay`` option, messages wait in the broker."""

    delaying_channel = Channel

    def waits_in(self, settings: DelaySettings) -> str:
        """Where delayed messages wait; needs no connection."""
        return "their queue of pgmq, invisible"

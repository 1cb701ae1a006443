"""The batch of a channel, through which kombu's ``Producer.batch()`` (5.7) publishes.

Messages are held back until the batch is flushed, then all sent with confirms in a window; those
with an ETA ahead go into the delay levels as ever.
"""

from __future__ import annotations

from time import time_ns
from typing import Any

import amqp

from ...errors import PublishRefused
from ...message import due_of
from .channels import Publication
from .outbox import IN_DOUBT
from .own_connection import LOST
from .sending import Sender
from .wrapping import has_copies


class PublishBatch:
    """The session that kombu publishes a batch through; *channel* is the user's."""

    def __init__(self, channel: Any, *, max_size: int) -> None:
        self.channel = channel
        self._max_size = max_size
        self._delays = channel.delays
        self._sender = Sender(channel.connection, self._delays.settings.confirm_window)
        #: With the due time of each, None for one without.
        self._held: list[tuple[Publication, int | None]] = []

    def publish(
        self,
        message: amqp.Message,
        exchange: str = "",
        routing_key: str = "",
        mandatory: bool = False,
        **_: Any,
    ) -> None:
        """Hold *message* back, or raise why it cannot wait; a full batch is flushed."""
        headers = message.properties.get("application_headers") or {}
        due_us = due_of(headers)
        waits = due_us is not None and self._delays.units(due_us, now_us=time_ns() // 1000)
        if waits and ("CC" in headers or "BCC" in headers):
            raise has_copies(exchange)
        self._held.append((Publication(message, exchange, routing_key, mandatory), due_us))
        if len(self._held) >= self._max_size:
            self.flush()

    def flush(self) -> None:
        """Send what is held back, and return when the broker has confirmed all of it.

        PublishRefused names each that it did not take or that is in doubt, the unsent ones too.
        """
        held, self._held = self._held, []
        sent = 0
        try:
            for publication, due_us in held:
                if due_us is not None:
                    publication = self._delays.into_levels(publication, due_us=due_us)
                self._sender.send(publication)
                sent += 1
            self._sender.settle()
        except LOST as exc:
            refused = [
                *self._sender.take_refused(),
                *(message.refused(IN_DOUBT) for message in self._sender.take_in_doubt()),
                *(unsent.refused("not sent") for unsent, _ in held[sent:]),
            ]
            raise PublishRefused(
                f"{type(exc).__name__}: {exc}; {len(refused)} message(s) of the batch refused, "
                f"unsent or in doubt",
                tuple(refused),
            ) from exc
        if refused := self._sender.take_refused():
            raise PublishRefused(
                f"the broker did not take {len(refused)} message(s) of the batch, the first being "
                f"{refused[0]}; all others are confirmed",
                tuple(refused),
            )

    def discard(self) -> None:
        self._held.clear()

    def close(self) -> None:
        self._held.clear()
        self._sender.close()

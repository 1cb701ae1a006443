"""Shared code to publish delayed messages on kombu's virtual transports."""

from __future__ import annotations

from abc import abstractmethod
from functools import cached_property
from time import time_ns as real_time_ns
from typing import Any

from ...due_time import check_due, milliseconds_up
from ...errors import NativeDelayError
from ...now import time_ns
from ...settings import DelaySettings
from ...store.interface import Store
from ...store.opened import store_of
from .wrapping import wrapped


class VirtualDelays:
    """Publishes delayed messages on one channel; each broker has a subclass."""

    refusal: NativeDelayError | None = None
    """The error that every delayed publish raises, or None if delays work."""

    def __init__(self, channel: Any, settings: DelaySettings) -> None:
        self.settings = settings
        self._channel = channel

    @cached_property
    def store(self) -> Store | None:
        """Return the store in ``native_delay_store``; None if not set."""
        self.check_settings()
        return None if self.settings.store is None else store_of(self.settings, self.place)

    @property
    def place(self) -> str:
        """The database or prefix, which tells this broker from others of the same namespace."""
        return str(self._channel.connection.client.virtual_host or "")

    def check_settings(self) -> None:
        """If this channel cannot delay messages, raise the error stored in :attr:`refusal`."""
        if self.refusal is not None:
            raise self.refusal

    def check_reach(self, due_us: int) -> None:
        """Raise DelayTooLong if the delay is longer than the settings allow."""
        check_due(
            due_us,
            now_us=time_ns() // 1000,
            longest_delay_seconds=self.settings.longest_delay_seconds,
        )


class SendingDelays(VirtualDelays):
    """Publishes delayed messages to SQS or pgmq, which delay by themselves."""

    def put_of(
        self,
        queue: str,
        message: dict[str, Any],
        *,
        due_us: int,
        delivery_id: str | None = None,
    ) -> Any:
        """Add this package's header to *message*, and encode *message* for *queue*.

        If *delivery_id* is None, the delivery id is kombu's delivery tag.
        """
        self.check_settings()
        tag = str(message["properties"]["delivery_tag"])
        told = wrapped(message, due_ms=milliseconds_up(due_us), delivery_id=delivery_id or tag)
        return self._put(queue, told, due_us)

    @abstractmethod
    def _put(self, queue: str, message: dict[str, Any], due_us: int) -> Any:
        """Encode a message that already has this package's header."""

    @abstractmethod
    def send(self, put: Any, *, now_us: int) -> None:
        """Send a message that :meth:`put_of` has encoded."""

    def publish(
        self,
        queue: str,
        message: dict[str, Any],
        *,
        due_us: int,
        delivery_id: str | None = None,
    ) -> None:
        """Publish a delayed message for *queue*; *delivery_id* is as in :meth:`put_of`."""
        put = self.put_of(queue, message, due_us=due_us, delivery_id=delivery_id)
        self.send(put, now_us=real_time_ns() // 1000)

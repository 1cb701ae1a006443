"""Shared code to publish delayed messages on kombu's virtual transports."""

from __future__ import annotations

from ...due_time import check_due
from ...errors import NativeDelayError
from ...now import time_ns
from ...settings import DelaySettings


class Delays:
    """Publishes delayed messages on one channel; each broker has a subclass."""

    refusal: NativeDelayError | None = None
    """The error that every delayed publish raises, or None if delays work."""

    def __init__(self, settings: DelaySettings) -> None:
        self.settings = settings

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

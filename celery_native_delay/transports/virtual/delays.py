"""Delayed delivery on one channel of a virtual transport, as far as it is the same on all."""

from __future__ import annotations

from time import time_ns

from ...due_time import check_due
from ...errors import NativeDelayError
from ...settings import DelaySettings


class Delays:
    """Delayed publishing on one channel; the ``delays.py`` of each broker adds how."""

    refusal: NativeDelayError | None = None
    """The reason why nothing is delayed; a producer is told."""

    def __init__(self, settings: DelaySettings) -> None:
        self.settings = settings

    def check_settings(self) -> None:
        """Raise what is wrong with the settings."""
        if self.refusal is not None:
            raise self.refusal

    def check_reach(self, due_us: int) -> None:
        """Raise DelayTooLong for what is further away than the longest delay."""
        check_due(
            due_us,
            now_us=time_ns() // 1000,
            longest_delay_seconds=self.settings.longest_delay_seconds,
        )

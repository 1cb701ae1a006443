"""Reasons to reject a row, in the words that reports group by."""

from __future__ import annotations

from ..durations import duration
from .options import FanOutOptions
from .slots import Slot, column_text


class Reasons:
    """The reasons of one fan-out, whose limits they name."""

    no_time = "no due time, or none that can be read"
    no_number = "the countdown is NaN or infinite"
    past = "the due time has passed"
    priority = "the priority is not in 0 to 255"
    no_queue = "the queue has no name"
    unknown_queue = "the queue is not one that the app's configuration names"
    expired = "it expires before it is due"

    def __init__(self, options: FanOutOptions, longest_seconds: float) -> None:
        self.latest_us = options.now_us + int(longest_seconds * 1_000_000)
        self.too_far = f"the due time is beyond the longest delay of {duration(longest_seconds)}"
        self.too_large = f"the arguments take more than {options.max_body_bytes:,} bytes"

    def null(self, slot: Slot) -> str:
        """Reason that the value of *slot* is missing."""
        return f"{slot.label} ({column_text(slot.column)}) is null"

    def not_a_number(self, slot: Slot) -> str:
        """Reason that the value of *slot* is a number that JSON does not have."""
        return f"{slot.label} ({column_text(slot.column)}) is NaN or infinite"

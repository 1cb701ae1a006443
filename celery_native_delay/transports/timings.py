"""The pace of a broker, and the interface of those whose pace can be measured."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable


@dataclass(frozen=True)
class Timings:
    """The pace of a broker's level queues, as measured from outside, with nothing else to do.

    *one_queue_per_second* are messages that a single queue passes when it is full of expired ones,
    *many_queues_per_second* those that all pass together. *lone_turn_ms* is what each further
    queue adds when in each a single message expires, *publish_ms* what each further message adds
    when many are published and handed out. *idle_ms* is how late a lone message is after one hop.
    Under a light load all stood still *pauses_per_minute* times, for *pause_ms*.
    """

    one_queue_per_second: float
    many_queues_per_second: float
    lone_turn_ms: float
    publish_ms: float
    idle_ms: float
    pause_ms: float = 0.0
    pauses_per_minute: float = 0.0


@runtime_checkable
class Calibrates(Protocol):
    """An admin part on a broker in which messages wait in queues that have a ceiling."""

    def calibrate(self, say: Callable[[str], object]) -> Timings:
        """Measure the level queues with some of its own, which are gone afterwards.

        *say* is told what goes on; it takes half a minute.

        Raises:
            NotPermitted: this broker user may not declare them.
        """

    def cores(self) -> int:
        """Number of the broker's processors, of all its nodes; 0 where they do not tell it yet.

        Raises:
            ManagementUnavailable: it cannot be seen.
        """

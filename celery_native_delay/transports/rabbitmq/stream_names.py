"""The streams of a ledger that RabbitMQ keeps itself: names and arguments, for ``topology.py``.

Its rules hold here, too. Entries are spread by how long a message waits, so that nothing has to be
read, nor kept on disk, for much longer than it may wait; and nothing is thrown away before.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from ...settings import DelaySettings

#: The longest wait of the messages noted in each, in seconds; the last one takes the others.
_SPANS = (("hour", 3_600), ("day", 86_400), ("month", 2_592_000))
_LAST_SPAN = "years"

#: How long a decision is remembered after the due time of its message, in seconds: so long one may
#: lie in its queue before a worker asks about it.
DECISION_GRACE_SECONDS = 30 * 86_400

#: Clocks differ, and the broker keeps its own.
_CLOCKS_SECONDS = 3_600


@dataclass(frozen=True)
class Stream:
    """A stream in which nothing that is older than *reach_seconds* is of interest."""

    name: str
    reach_seconds: int

    @property
    def arguments(self) -> dict[str, Any]:
        """Arguments of its declaration. https://www.rabbitmq.com/docs/streams

        RabbitMQ throws away whole segments, and never the one it writes to: small ones, so that
        what is older than ``x-max-age`` really goes.
        """
        return {
            "x-queue-type": "stream",
            "x-queue-leader-locator": "balanced",
            "x-max-age": f"{self.reach_seconds + _CLOCKS_SECONDS}s",
            "x-stream-max-segment-size-bytes": 50_000_000,
        }


class LedgerStreams:
    """The streams of one set of levels; *name* is the set's."""

    def __init__(self, name: str, settings: DelaySettings) -> None:
        #: A direct exchange that leads to each of them by its name.
        self.exchange = f"{name}.ledger"
        #: Says that the set is complete.
        self.ready_exchange = f"{name}.ledger.ready"
        self._name = name
        self._longest_seconds = math.ceil(settings.longest_delay_seconds)

    @property
    def streams(self) -> list[Stream]:
        """All of them: first those of the decisions."""
        return [*self.of_decisions, *self.of_entries]

    @cached_property
    def of_entries(self) -> list[Stream]:
        """Streams for copies of what waits, shortest waits first."""
        return [Stream(f"{self.exchange}.{name}", reach) for name, reach in self._reaches(_SPANS)]

    @cached_property
    def of_decisions(self) -> list[Stream]:
        """Streams that note what was cancelled and moved, shortest waits first."""
        return [
            Stream(f"{self._name}.decisions.{name}", reach + DECISION_GRACE_SECONDS)
            for name, reach in self._reaches(_SPANS[-1:])
        ]

    def for_entry(self, wait_seconds: float) -> Stream:
        """The stream for the copy of a message that waits so long."""
        return _shortest(self.of_entries, wait_seconds)

    def for_decision(self, wait_seconds: float) -> Stream:
        """The stream for a decision about messages that are due within so many seconds."""
        return _shortest(self.of_decisions, wait_seconds + DECISION_GRACE_SECONDS)

    def _reaches(self, spans: tuple[tuple[str, int], ...]) -> list[tuple[str, int]]:
        reaches = [(name, seconds) for name, seconds in spans if seconds < self._longest_seconds]
        return [*reaches, (_LAST_SPAN, self._longest_seconds)]


def _shortest(streams: list[Stream], seconds: float) -> Stream:
    return next((stream for stream in streams if seconds <= stream.reach_seconds), streams[-1])

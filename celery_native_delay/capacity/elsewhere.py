"""A load on brokers without level queues: what waits, where that is known, and what limits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .load import Load

#: By transport, the bytes for a message that waits besides its own, where it waits in memory.
_MORE_BYTES = {"redis": 490}

_LIMITS = {
    "redis": "Redis hands over a hundred messages in a script, 194,000 a second in the benchmark: "
    "its memory is the limit, and how fast producers send and workers run",
    "sql": "a store takes in and hands over some thousand messages a second, by its disk: measure "
    "yours with `python -m benchmarks --only store`",
    "sqs": "up to 15 minutes a standard queue has no limit; longer delays pass through a FIFO "
    "queue, with 300 requests a second for each action, ten messages in each, unless it has high "
    "throughput: `delay plan DURATION` tells the requests of a delay",
    "pgmq": "PostgreSQL keeps what waits, and its disk is the limit: measure yours with "
    "`python -m benchmarks --only store`",
}

#: Of a task with a small argument.
MESSAGE_BYTES = 1_000


@dataclass(frozen=True)
class Elsewhere:
    """A load on a broker of another kind: what waits of it, and the limit there."""

    transport: str
    load: Load

    @property
    def memory_bytes(self) -> int | None:
        """Memory of the broker for what waits; None where it keeps that on disk."""
        more = _MORE_BYTES.get(self.transport)
        return None if more is None else round(self.load.waiting * (MESSAGE_BYTES + more))

    def as_json(self) -> dict[str, Any]:
        return {
            "load": self.load.as_json(),
            "transport": self.transport,
            "waiting": round(self.load.waiting),
            "memory_bytes": self.memory_bytes,
            "limit": _LIMITS[self.transport],
        }

    def lines(self, table: Callable[..., str]) -> list[str]:
        lines = [f"{self.load}", f"{self.load.waiting:,.0f} wait at a time"]
        if self.memory_bytes is not None:
            lines[-1] += (
                f", in {self.memory_bytes / 1e6:,.1f} MB of memory where messages have "
                f"{MESSAGE_BYTES:,} bytes"
            )
        return [*lines, _LIMITS[self.transport]]

"""A broker's speed, as far as it decides how late delayed messages are."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from ..transports.timings import Timings
from .load import InvalidLoad

#: Unconfirmed messages that RabbitMQ lets a level queue have on their way, unless told otherwise.
PREFETCH = 32


@dataclass(frozen=True)
class Service:
    """The work of RabbitMQ for delayed messages, and what it has to do it with.

    A level queue takes its *turn* when something in it has expired: it hands over as much of it as
    it has places, and *commit_ms* later these are free for the next turn. All turns share the
    *cores*.
    """

    cores: float
    """Processors that the broker has for itself; those of all nodes of a cluster."""
    message_ms: float
    """CPU to take in a message and hand it to a worker, whatever it waited for."""
    hop_ms: float
    """CPU for each message of a turn."""
    turn_ms: float
    """CPU for a turn besides, however many messages."""
    commit_ms: float
    """From the end of a turn until its places are free: disk, replicas, and answers."""
    prefetch: int = PREFETCH
    """Places: RabbitMQ's ``dead_letter_worker_consumer_prefetch``."""
    pause_ms: float = 0.0
    """So long everything stands still now and then: disk, collected garbage, a neighbour."""
    pauses_per_minute: float = 0.0

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            least = 0 if name.endswith(("_ms", "_minute")) else 0.001
            if not isinstance(value, int | float) or not math.isfinite(value) or value < least:
                raise InvalidLoad(f"expected {name} of at least {least:g}, got {value!r}")
        if not self.message_ms or not self.hop_ms + self.turn_ms + self.commit_ms:
            raise InvalidLoad("expected messages and hops that take some time, got none that do")

    @classmethod
    def of(cls, timings: Timings, *, cores: float, prefetch: int = PREFETCH) -> Service:
        """The speed of a broker that was measured.

        Full turns of all queues at once are limited by the processors: that is what a message of
        one costs. Turns of one message each cost what a turn costs besides. A single queue is
        limited by its places: what it takes longer than its own work, it waits.
        """
        full_ms = cores * 1000 / timings.many_queues_per_second
        alone_ms = cores * timings.lone_turn_ms
        turn_ms = max(0.0, alone_ms - full_ms) * prefetch / (prefetch - 1) if prefetch > 1 else 0.0
        # A turn costs nothing that its messages do not pay for.
        turn_ms = min(turn_ms, full_ms * prefetch)
        hop_ms = full_ms - turn_ms / prefetch
        service_ms = prefetch * 1000 / timings.one_queue_per_second
        return cls(
            cores,
            message_ms=cores * timings.publish_ms,
            hop_ms=hop_ms,
            turn_ms=turn_ms,
            commit_ms=max(0.0, service_ms - turn_ms - prefetch * hop_ms),
            prefetch=prefetch,
            pause_ms=timings.pause_ms,
            pauses_per_minute=timings.pauses_per_minute,
        )

    @classmethod
    def from_json(cls, text: str) -> Service:
        """The speed in the JSON of this command, or in its part ``service``.

        Raises:
            InvalidLoad: it is none.
        """
        names = {field.name for field in fields(cls)}
        try:
            told = json.loads(text)
            told = told.get("service", told)
            return cls(**{name: told[name] for name in names if name in told})
        except (AttributeError, TypeError, ValueError) as exc:
            if isinstance(exc, InvalidLoad):
                raise
            raise InvalidLoad(
                f"expected the JSON of `delay capacity --calibrate --json`, with "
                f"{', '.join(sorted(names))}; got {type(exc).__name__}: {exc}"
            ) from exc

    @property
    def service_ms(self) -> float:
        """So long a message holds a place of a full queue, when nothing else goes on."""
        return self.commit_ms + self.turn_ms + self.prefetch * self.hop_ms

    @property
    def ceiling_per_second(self) -> float:
        """Messages that one level queue passes a second at most."""
        return self.prefetch * 1000 / self.service_ms

    def limit_per_second(self, hops: float) -> float:
        """Tasks with so many hops that the processors carry a second, in full turns."""
        cost_ms = self.message_ms + hops * (self.hop_ms + self.turn_ms / self.prefetch)
        return self.cores * 1000 / cost_ms

    def with_service_ms(self, service_ms: float) -> Service:
        """This broker with another :attr:`service_ms`: another wait, or less work if it must."""
        work_ms = self.turn_ms + self.prefetch * self.hop_ms
        if service_ms >= work_ms:
            return replace(self, commit_ms=service_ms - work_ms)
        less = service_ms / work_ms
        return replace(self, commit_ms=0.0, turn_ms=self.turn_ms * less, hop_ms=self.hop_ms * less)

    def as_json(self) -> dict[str, Any]:
        """Plain data, which :meth:`from_json` reads."""
        return asdict(self) | {
            "service_ms": self.service_ms,
            "ceiling_per_second": self.ceiling_per_second,
        }


def chosen(service: Service, changes: Mapping[str, Any]) -> Service:
    """*service* with what the user says otherwise; *changes* of None are none."""
    told = {name: value for name, value in changes.items() if value is not None}
    service_ms = told.pop("service_ms", None)
    service = replace(service, **told)
    return service if service_ms is None else service.with_service_ms(service_ms)


#: The machine of the project's benchmarks: RabbitMQ 4.3 on two cores, a tenth of which it takes for
#: itself (``python -m benchmarks.capacity``).
BENCHMARKED = Service(
    cores=1.8,
    message_ms=0.08,
    hop_ms=0.13,
    turn_ms=0.54,
    commit_ms=6.9,
    pause_ms=160,
    pauses_per_minute=8.5,
)

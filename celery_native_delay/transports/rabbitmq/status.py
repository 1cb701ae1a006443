"""Count waiting messages and tasks for the command ``delay status``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

from amqp.exceptions import AccessRefused

from ...durations import duration
from ...errors import ManagementUnavailable
from ...finding import WRONG, Finding
from ...texts import table
from ..interface import LevelQueue, Told
from ..status import parked_finding
from .delays import RabbitDelays
from .management import ManagementAPI
from .parking import count

_SHOWS_MORE = "native_delay_store shows more: which tasks wait, and which are overdue"


@dataclass(frozen=True)
class LevelStatus:
    """The number of messages in one delay queue (a queue with a TTL)."""

    queue: str
    ttl_seconds: float
    #: None if the queue does not exist.
    waiting: int | None
    #: The number of due messages that RabbitMQ has not dead-lettered yet; None if unknown.
    stuck: int | None


@dataclass(frozen=True)
class LandingStatus:
    """The number of due messages that RabbitMQ could not dead-letter from one landing queue."""

    queue: str
    held: int


@dataclass(frozen=True)
class UnconsumedQueue:
    """One of the app's queues: due tasks lie there, and no worker consumes from it."""

    queue: str
    messages: int


@dataclass(frozen=True)
class RabbitStatus:
    """The counts of messages and tasks that ``delay status`` prints."""

    name: str
    levels: list[LevelStatus]
    landings: list[LandingStatus]
    parked: int
    next_due_within_seconds: float | None
    #: True if no store beside the broker shows more.
    alone: bool
    #: The app's queues with messages and without a consumer.
    unconsumed: list[UnconsumedQueue]

    @property
    def waiting(self) -> int:
        """Return the number of messages in the delay queues."""
        return sum(level.waiting or 0 for level in self.levels)

    @property
    def stuck(self) -> int | None:
        """The number of due messages that RabbitMQ could not dead-letter; None if unknown."""
        known = [level.stuck for level in self.levels if level.stuck is not None]
        return sum(known) + sum(landing.held for landing in self.landings) if known else None

    def findings(self) -> list[Finding]:
        """Report parked messages, and queues without a worker."""
        found = [
            Finding(
                "workers",
                WRONG,
                f"no worker consumes from {each.queue}: {each.messages} message(s) lie there",
                f"start workers that consume from {each.queue}",
            )
            for each in self.unconsumed
        ]
        if self.parked:
            found.append(parked_finding(self.parked, "no queue was bound for them"))
        return found

    def told(self) -> Told:
        lines = []
        missing = [level.queue for level in self.levels if level.waiting is None]
        if missing:
            lines.append(f"{len(missing)} level queue(s) are not declared, such as {missing[0]}")
        rows = [
            (
                level.queue,
                duration(level.ttl_seconds),
                level.waiting,
                "?" if level.stuck is None else level.stuck,
            )
            for level in self.levels
            if level.waiting or level.stuck
        ]
        if rows:
            lines.append(table(("level queue", "ttl", "waiting", "stuck"), rows))
        lines += [
            f"{landing.queue} holds {landing.held} message(s): their destination rejects them"
            for landing in self.landings
        ]
        stuck = "unknown (management API not reachable)" if self.stuck is None else self.stuck
        due = self.next_due_within_seconds
        within = "-" if due is None else f"within {duration(due, up=True)}"
        lines += [
            f"waiting   {self.waiting}",
            f"next due  {within}",
            f"parked    {self.parked}",
            f"stuck     {stuck}",
            *([_SHOWS_MORE] if self.alone else []),
        ]
        facts = asdict(self) | {"waiting": self.waiting, "stuck": self.stuck}
        return Told(facts, lines, self.findings())


def status(delays: RabbitDelays, api: ManagementAPI, consumed: Iterable[Any] = ()) -> RabbitStatus:
    """Count waiting messages, and due messages that RabbitMQ could not deliver.

    Workers should consume from the queues *consumed*, which are kombu's objects.
    """
    topology = delays.topology
    try:
        queues = {queue["name"]: queue for queue in api.named("queues", f"{topology.name}.")}
    except ManagementUnavailable:
        queues = {}
    levels = [
        LevelStatus(
            queue=hop.queue,
            ttl_seconds=hop.delay_ms / 1000,
            waiting=delays.declarer.depth(hop.queue),
            stuck=queues[hop.queue].get("messages_dlx", 0) if hop.queue in queues else None,
        )
        for hop in topology.level_queues
    ]
    landings = [
        LandingStatus(name, held)
        for name, queue in queues.items()
        if topology.is_landing(name) and (held := queue.get("messages", 0))
    ]
    # A message waits for this level and at most all shorter ones: less than twice this TTL.
    nearest = next((level for level in levels if level.waiting), None)
    within = None if nearest is None else 2 * nearest.ttl_seconds
    unconsumed = list(_unconsumed(delays, [queue.name for queue in consumed]))
    alone = delays.settings.store is None
    parked = count(delays)
    return RabbitStatus(topology.name, levels, landings, parked, within, alone, unconsumed)


def _unconsumed(delays: RabbitDelays, names: Iterable[str]) -> Iterator[UnconsumedQueue]:
    for name in names:
        with suppress(AccessRefused):
            found = None if delays.mirror.ignores(name) else delays.declarer.look_at(name)
            if found is not None and found.message_count and not found.consumer_count:
                yield UnconsumedQueue(name, int(found.message_count))


def levels(delays: RabbitDelays) -> Iterator[LevelQueue]:
    """Count the messages of each delay queue over AMQP."""
    topology = delays.topology
    for hop in topology.level_queues:
        waiting = delays.declarer.depth(hop.queue)
        if waiting is not None:
            name = hop.queue.removeprefix(f"{topology.name}.")
            yield LevelQueue(name, hop.delay_ms / 1000, waiting)

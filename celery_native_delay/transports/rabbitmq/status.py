"""Count waiting messages and tasks for the command ``delay status``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

from amqp.exceptions import AccessRefused

from ...durations import duration
from ...errors import ManagementUnavailable
from ...finding import WRONG, Finding
from ..interface import LevelQueue
from ..recorded import RecordsStatus
from ..virtual.status import parked_finding
from .delays import Delays
from .management import ManagementAPI
from .parking import count


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
class Status:
    """The counts of messages and tasks that ``delay status`` prints."""

    name: str
    levels: list[LevelStatus]
    landings: list[LandingStatus]
    parked: int
    next_due_within_seconds: float | None
    #: The app's queues with messages and without a consumer.
    unconsumed: list[UnconsumedQueue]
    records: RecordsStatus | None = None

    @property
    def in_levels(self) -> int:
        return sum(level.waiting or 0 for level in self.levels)

    @property
    def waiting(self) -> int:
        """Return the number of waiting tasks, including overdue tasks."""
        known = self._known
        return self.in_levels if known is None else known.ahead + known.overdue

    @property
    def not_in_records(self) -> int | None:
        """Return how many delayed messages are missing from the list of waiting tasks.

        Return None if the list is not configured or unreachable.
        """
        return None if self._known is None else self.in_levels - self._known.ahead

    @property
    def _known(self) -> RecordsStatus | None:
        return self.records if self.records and self.records.error is None else None

    @property
    def stuck(self) -> int | None:
        """The number of due messages that RabbitMQ could not dead-letter; None if unknown."""
        known = [level.stuck for level in self.levels if level.stuck is not None]
        return sum(known) + sum(landing.held for landing in self.landings) if known else None

    def as_json(self) -> dict[str, Any]:
        known = self._known
        told = asdict(self) | {
            "waiting": self.waiting,
            "in_levels": self.in_levels,
            "not_in_records": self.not_in_records,
            "overdue": known and known.overdue,
            "overdue_seconds": known and known.overdue_seconds,
            "stuck": self.stuck,
            "records": self.records and {"where": self.records.where, "error": self.records.error},
        }
        if known is not None:
            told["next_due_within_seconds"] = 0 if known.overdue else known.next_due_seconds
        return told

    def findings(self) -> list[Finding]:
        """Report parked and overdue messages, and queues without a worker."""
        found = [] if self._known is None else self._known.findings(parked=self.parked)
        found += [
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

    def lines(self, table: Callable[[tuple[str, ...], list[tuple[Any, ...]]], str]) -> list[str]:
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
        records = self.records and (self.records.error or self.records.where)
        return [
            *lines,
            *(self._counted() if self._known is None else self._listed(self._known)),
            f"parked    {self.parked}",
            f"stuck     {stuck}",
            *([f"records   {records}"] if records else []),
        ]

    def _counted(self) -> list[str]:
        due = self.next_due_within_seconds
        why, most = "native_delay_records is not set", ""
        if self.records is not None:
            why = "the records are unreachable"
            most = ", with the messages of cancelled and rescheduled tasks"
        return [
            f"waiting   {self.waiting}{most if self.waiting else ''}",
            f"next due  {'-' if due is None else f'within {duration(due, up=True)}'}",
            f"overdue   unknown ({why})",
        ]

    def _listed(self, known: RecordsStatus) -> list[str]:
        due, overdue = known.next_due_seconds, known.overdue
        until = "-" if due is None else f"in {duration(due)}"
        if overdue:
            until = "overdue" if due is None else f"overdue, then {until}"
        lines = [f"waiting   {self.waiting}", f"next due  {until}"]
        if overdue:
            since = duration(known.overdue_seconds)
            parked = ", parked ones included" if self.parked else ""
            late = f"the first for {since}; no installed worker has received them{parked}"
            lines.append(f"overdue   {overdue}, {late}")
        else:
            lines.append("overdue   0")
        return [*lines, f"in levels {self.in_levels}{self._explained(known)}"]

    def _explained(self, known: RecordsStatus) -> str:
        more = self.in_levels - known.ahead
        if more > 0:
            return (
                f" messages, {more} of them not in the records: of cancelled or rescheduled tasks "
                f"(they stay until their old due time), or sent without native_delay_records"
            )
        if more < 0:
            return (
                f" messages; {-more} tasks of the records are not in these levels, but between two "
                f"levels, in levels of other settings, or lost"
            )
        return ""


def status(delays: Delays, api: ManagementAPI, consumed: Iterable[Any] = ()) -> Status:
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
    return Status(topology.name, levels, landings, count(delays), within, unconsumed)


def _unconsumed(delays: Delays, names: Iterable[str]) -> Iterator[UnconsumedQueue]:
    for name in names:
        with suppress(AccessRefused):
            found = delays.declarer.look_at(name)
            if found is not None and found.message_count and not found.consumer_count:
                yield UnconsumedQueue(name, int(found.message_count))


def levels(delays: Delays) -> Iterator[LevelQueue]:
    """Count the messages of each delay queue over AMQP."""
    topology = delays.topology
    for hop in topology.level_queues:
        waiting = delays.declarer.depth(hop.queue)
        if waiting is not None:
            name = hop.queue.removeprefix(f"{topology.name}.")
            yield LevelQueue(name, hop.delay_ms / 1000, waiting)

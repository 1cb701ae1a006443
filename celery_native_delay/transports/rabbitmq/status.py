"""Count waiting messages and tasks for the command ``delay status``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

from ...durations import duration
from ...errors import ManagementUnavailable
from ...records.waiting import Query, WaitingTasks
from ..interface import LevelQueue
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
class RecordsStatus:
    """Counts from the list of waiting tasks: overdue tasks, and tasks not yet due."""

    where: str
    #: The error that prevented counting.
    error: str | None = None
    #: The number of tasks that are not due yet.
    ahead: int = 0
    next_due_seconds: float | None = None
    #: The number of due tasks that no worker with this package has received.
    overdue: int = 0
    overdue_seconds: float = 0.0

    @classmethod
    def of(cls, tasks: WaitingTasks, where: str, *, now_us: int) -> RecordsStatus:
        """Count the overdue and the future *tasks*; *where* is the URL of their storage."""
        ahead = Query(from_us=now_us)
        page, count = tasks.page(ahead, limit=1), tasks.count(ahead)
        next_due_seconds = (page.tasks[0].due_us - now_us) / 1e6 if page.tasks else None
        span = tasks.span()
        first_us = now_us if span is None else min(span[0], now_us)
        overdue = tasks.count(Query(until_us=now_us))
        return cls(where, None, count, next_due_seconds, overdue, (now_us - first_us) / 1e6)


@dataclass(frozen=True)
class Status:
    """The counts of messages and tasks that ``delay status`` prints."""

    name: str
    levels: list[LevelStatus]
    landings: list[LandingStatus]
    parked: int
    next_due_within_seconds: float | None
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


def status(delays: Delays, api: ManagementAPI) -> Status:
    """Count waiting messages, and due messages that RabbitMQ could not deliver."""
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
    return Status(topology.name, levels, landings, count(delays), within)


def levels(delays: Delays) -> Iterator[LevelQueue]:
    """Count the messages of each delay queue over AMQP."""
    topology = delays.topology
    for hop in topology.level_queues:
        waiting = delays.declarer.depth(hop.queue)
        if waiting is not None:
            name = hop.queue.removeprefix(f"{topology.name}.")
            yield LevelQueue(name, hop.delay_ms / 1000, waiting)

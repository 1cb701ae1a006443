"""Comparing the broker with the plan, and counting what waits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from time import sleep
from typing import Any

from amqp.exceptions import AccessRefused, NotFound, PreconditionFailed

from ...core.clocks import MAY_DIFFER_IN_WHOLE_SECONDS, clock_finding
from ...core.durations import duration
from ...core.errors import ManagementUnavailable
from ...core.finding import UNCHECKED, WRONG, Finding
from ...core.ledger import Ledger, Query
from ...core.topology import Binding, Exchange, Queue, Topology
from ..contract import Level
from ..virtual.status import parked_finding
from .declaring import broker_version
from .delays import Delays
from .known_faults import known_faults
from .management import ManagementAPI, overriding_policies
from .parking import count

#: So many messages of a queue RabbitMQ dead-letters at a time, by default:
#: dead_letter_worker_consumer_prefetch.
DEAD_LETTERED_AT_ONCE = 32

#: The management API counts messages every 5 s.
COUNTED_ANEW_SECONDS = 6.0

_HELD_UP = (
    "bind a queue to the exchange that they go to, or make room in the queue that takes none; "
    "see `celery -A PROJ delay status`"
)


@dataclass(frozen=True)
class LevelStatus:
    """One level queue. *stuck* are messages in dead-lettering, None where nobody tells."""

    queue: str
    ttl_seconds: float
    waiting: int | None
    stuck: int | None


@dataclass(frozen=True)
class LandingStatus:
    """A landing queue that holds messages, because its destination takes none of them."""

    queue: str
    held: int


@dataclass(frozen=True)
class LedgerStatus:
    """The ledger's account of what waits; none of it is known while *error* says why it is away.

    *ahead* tasks are due later than now, the first in *next_due_seconds*. *overdue* ones are due,
    and no installed worker has received them; None from a ledger in streams, which cannot tell.
    """

    where: str
    error: str | None = None
    ahead: int = 0
    next_due_seconds: float | None = None
    overdue: int | None = None
    overdue_seconds: float | None = None

    @classmethod
    def of(cls, ledger: Ledger, where: str, *, now_us: int, keeps_overdue: bool) -> LedgerStatus:
        """By what *ledger* answers.

        Raises:
            LedgerUnavailable: it does not.
        """
        ahead = Query(from_us=now_us)
        page, count = ledger.page(ahead, limit=1), ledger.count(ahead)
        next_due_seconds = (page.tasks[0].due_us - now_us) / 1e6 if page.tasks else None
        if not keeps_overdue:
            return cls(where, None, count, next_due_seconds)
        span = ledger.span()
        first_us = now_us if span is None else min(span[0], now_us)
        overdue = ledger.count(Query(until_us=now_us))
        return cls(where, None, count, next_due_seconds, overdue, (now_us - first_us) / 1e6)


@dataclass(frozen=True)
class Status:
    """What waits in one set of delay levels, and what a *ledger* says of it."""

    name: str
    levels: list[LevelStatus]
    landings: list[LandingStatus]
    parked: int
    next_due_within_seconds: float | None
    ledger: LedgerStatus | None = None

    @property
    def in_levels(self) -> int:
        """Messages in all levels."""
        return sum(level.waiting or 0 for level in self.levels)

    @property
    def waiting(self) -> int:
        """Tasks that wait, overdue ones too, where a ledger says so; or else all messages."""
        known = self._known
        return self.in_levels if known is None else known.ahead + (known.overdue or 0)

    @property
    def not_in_ledger(self) -> int | None:
        """Messages in the levels beyond the tasks that the ledger lists there; None without it."""
        return None if self._known is None else self.in_levels - self._known.ahead

    @property
    def _known(self) -> LedgerStatus | None:
        return self.ledger if self.ledger and self.ledger.error is None else None

    @property
    def stuck(self) -> int | None:
        """Messages held up in dead-lettering, None where the management API is away."""
        known = [level.stuck for level in self.levels if level.stuck is not None]
        return sum(known) + sum(landing.held for landing in self.landings) if known else None

    def as_json(self) -> dict[str, Any]:
        """For ``--json``."""
        known = self._known
        told = asdict(self) | {
            "waiting": self.waiting,
            "in_levels": self.in_levels,
            "not_in_ledger": self.not_in_ledger,
            "overdue": known and known.overdue,
            "overdue_seconds": known and known.overdue_seconds,
            "stuck": self.stuck,
            "ledger": self.ledger and {"where": self.ledger.where, "error": self.ledger.error},
        }
        if known is not None:
            told["next_due_within_seconds"] = 0 if known.overdue else known.next_due_seconds
        return told

    def lines(self, table: Callable[[tuple[str, ...], list[tuple[Any, ...]]], str]) -> list[str]:
        """For people."""
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
            f"{landing.queue} holds {landing.held}: its destination takes none of them"
            for landing in self.landings
        ]
        stuck = "unknown (management API not reachable)" if self.stuck is None else self.stuck
        return [
            *lines,
            *(self._counted() if self._known is None else self._listed(self._known)),
            f"parked    {self.parked}",
            f"stuck     {stuck}",
            *(
                []
                if self.ledger is None
                else [f"ledger    {self.ledger.error or self.ledger.where}"]
            ),
        ]

    def _counted(self) -> list[str]:
        """By the levels alone."""
        due = self.next_due_within_seconds
        why = "native_delay_ledger is not set" if self.ledger is None else "the ledger is away"
        most = (
            "" if self.ledger is None else ", or fewer: what was cancelled or moved is among them"
        )
        return [
            f"waiting   {self.waiting}{most if self.waiting else ''}",
            f"next due  {'-' if due is None else f'within {duration(due, up=True)}'}",
            f"overdue   unknown ({why})",
        ]

    def _listed(self, known: LedgerStatus) -> list[str]:
        """By the ledger, and what the levels hold besides."""
        due, overdue = known.next_due_seconds, known.overdue
        late = "no installed worker has received"
        until = "-" if due is None else f"in {duration(due)}"
        if overdue:
            until = "overdue" if due is None else f"overdue, then {until}"
        lines = [f"waiting   {self.waiting}", f"next due  {until}"]
        if overdue is None:
            lines.append("overdue   unknown (a ledger in streams forgets what is due)")
        elif overdue:
            since = duration(known.overdue_seconds or 0.0)
            them = "it" if overdue == 1 else "them"
            parked = "; parked ones are among them" if self.parked else ""
            lines.append(f"overdue   {overdue}, the first for {since}: {late} {them}{parked}")
        else:
            lines.append("overdue   0")
        return [*lines, f"in levels {self.in_levels}{self._explained(known)}"]

    def _explained(self, known: LedgerStatus) -> str:
        more = self.in_levels - known.ahead
        if more > 0:
            return (
                f" = {known.ahead} that the ledger has ahead + {more} that it does not list: what "
                f"was cancelled or moved stays there until it was due, and so does what is no "
                f"task, or was sent without the ledger"
            )
        if more < 0:
            return (
                f": {-more} of the {known.ahead} that the ledger has ahead are elsewhere: between "
                f"two levels, in levels of other settings, or lost"
            )
        return ""


def verify(delays: Delays, api: ManagementAPI) -> list[Finding]:
    """Compare the broker with the plan, through the management API where it answers."""
    topology = delays.topology
    try:
        found = [*_compare_by_api(topology, api), *overriding_policies(api, topology)]
        queues = api.queues(f"{topology.space}.")
        replicated = any(len(queue.get("members") or ()) > 1 for queue in queues)
        return found + known_faults(broker_version(delays.connection), replicated=replicated)
    except ManagementUnavailable as exc:
        sentence = f"bindings and policies: {exc}"
        unchecked = Finding.of_sentence("policies", UNCHECKED, sentence)
        found = [unchecked, *_compare_by_amqp(delays)]
        return found + known_faults(broker_version(delays.connection), replicated=None)


def examine(delays: Delays, api: ManagementAPI) -> list[Finding]:
    """Look at what is parked or held up, and at the clock of the broker's machine."""
    found = status(delays, api)
    findings = []
    if found.parked:
        findings.append(parked_finding(found.parked, "their destination was not there"))
    if suspected := _held_up(found):
        # What is merely on its way is gone when RabbitMQ has counted anew.
        sleep(COUNTED_ANEW_SECONDS)
        findings += [
            Finding("dead-lettering", WRONG, f"{queue} {held}", _HELD_UP)
            for queue, held in _held_up(status(delays, api)).items()
            if queue in suspected
        ]
    if found.stuck is None:
        problem = "what is stuck between two levels, and the broker's clock: see policies"
        way_out = "have the management API answer"
        findings.append(Finding("dead-lettering", UNCHECKED, problem, way_out))
    ahead_seconds = api.clock_ahead_seconds
    if ahead_seconds is not None:
        findings += clock_finding(
            "the broker's clock",
            ahead_seconds,
            "it is no matter to RabbitMQ but, if this machine's is wrong, delayed tasks from here "
            "are that much early or late",
            may_differ_seconds=MAY_DIFFER_IN_WHOLE_SECONDS,
        )
    return findings


def _held_up(found: Status) -> dict[str, str]:
    """Queues whose messages may go nowhere, and which those are."""
    levels = {
        level.queue: f"has {level.stuck} message(s) in dead-lettering, so that no other passes"
        for level in found.levels
        if (level.stuck or 0) >= DEAD_LETTERED_AT_ONCE
    }
    return levels | {
        landing.queue: f"holds {landing.held} message(s): its destination takes none of them"
        for landing in found.landings
    }


def status(delays: Delays, api: ManagementAPI) -> Status:
    """Count what waits in the levels and in the parking queue."""
    topology = delays.topology
    try:
        queues = {queue["name"]: queue for queue in api.queues(f"{topology.name}.")}
    except ManagementUnavailable:
        queues = {}
    levels = [
        LevelStatus(
            queue=hop.queue,
            ttl_seconds=hop.ttl_ms / 1000,
            waiting=_depth(delays, hop.queue),
            stuck=queues[hop.queue].get("messages_dlx", 0) if hop.queue in queues else None,
        )
        for hop in topology.level_queues
    ]
    landings = [
        LandingStatus(name, held)
        for name, queue in queues.items()
        if topology.is_landing(name) and (held := queue.get("messages", 0))
    ]
    # A message in a level has at most that level and all below it before it.
    nearest = next((level for level in levels if level.waiting), None)
    within = None if nearest is None else 2 * nearest.ttl_seconds
    return Status(topology.name, levels, landings, count(delays), within)


def levels(delays: Delays) -> Iterator[Level]:
    """The level queues that are declared, over AMQP alone."""
    topology = delays.topology
    for hop in topology.level_queues:
        waiting = _depth(delays, hop.queue)
        if waiting is not None:
            name = hop.queue.removeprefix(f"{topology.name}.")
            yield Level(name, hop.ttl_ms / 1000, waiting)


def _depth(delays: Delays, queue: str) -> int | None:
    try:
        return int(delays.declarer.queue_declare(queue, passive=True).message_count)
    except NotFound:
        return None


def _compare_by_api(topology: Topology, api: ManagementAPI) -> Iterator[Finding]:
    exchanges = {exchange["name"]: exchange for exchange in api.exchanges(f"{topology.space}.")}
    queues = {queue["name"]: queue for queue in api.queues(f"{topology.space}.")}
    bound: dict[str, set[tuple[str, str, str]]] = {}
    for declaration in topology.plan():
        match declaration:
            case Exchange(name, kind, arguments):
                there = exchanges.get(name)
                yield from _differing(name, "exchange", there, {"type": kind}, arguments)
            case Queue(name, arguments):
                yield from _differing(name, "queue", queues.get(name), {}, arguments)
            case Binding(source, destination, routing_key, to_exchange):
                kind, ends = ("exchange", exchanges) if to_exchange else ("queue", queues)
                if source not in exchanges or destination not in ends:
                    continue  # said already
                if source not in bound:
                    bound[source] = {
                        (item["destination_type"], item["destination"], item["routing_key"])
                        for item in api.bindings_from(source)
                    }
                if (kind, destination, routing_key) not in bound[source]:
                    yield _not_as_planned(
                        f"{source}: not bound to {destination} with {routing_key}"
                    )


def _differing(
    name: str,
    what: str,
    there: dict[str, Any] | None,
    fields: dict[str, Any],
    arguments: dict[str, Any],
) -> Iterator[Finding]:
    if there is None:
        yield _not_as_planned(f"{name}: {what} is missing")
        return
    expected = {"durable": True, "auto_delete": False} | fields
    found = {field: there.get(field) for field in expected}
    held = there.get("arguments") or {}
    expected |= arguments
    found |= {key: held.get(key) for key in arguments} | {
        key: value for key, value in held.items() if key not in arguments
    }
    for key in sorted(expected.keys() | found.keys()):
        if expected.get(key) != found.get(key):
            yield _made_otherwise(
                f"{name}: {key} {found.get(key)!r}, expected {expected.get(key)!r}"
            )


def _not_as_planned(problem: str) -> Finding:
    way_out = "start an installed worker, or run `celery -A PROJ delay declare`"
    return Finding("delay levels", WRONG, problem, way_out)


def _made_otherwise(problem: str) -> Finding:
    way_out = (
        "delete it when it is empty and run `celery -A PROJ delay declare`, or choose another "
        "native_delay_namespace"
    )
    return Finding("delay levels", WRONG, problem, way_out)


def _compare_by_amqp(delays: Delays) -> Iterator[Finding]:
    for declaration in delays.topology.plan():
        if isinstance(declaration, Binding):
            continue
        name = declaration.name
        try:
            # Passive first: comparing must not declare what is missing.
            _declare(delays, declaration, passive=True)
            _declare(delays, declaration, passive=False)
        except NotFound:
            yield _not_as_planned(f"{name}: {type(declaration).__name__.lower()} is missing")
        except PreconditionFailed as exc:
            yield _made_otherwise(f"{name}: {exc.reply_text}")
        except AccessRefused as exc:
            way_out = "ask as a user who may configure it"
            yield Finding("delay levels", UNCHECKED, f"{name}: {exc.reply_text}", way_out)


def _declare(delays: Delays, declaration: Exchange | Queue, *, passive: bool) -> None:
    name, arguments = declaration.name, declaration.arguments
    common = {"passive": passive, "durable": True, "auto_delete": False, "arguments": arguments}
    if isinstance(declaration, Exchange):
        delays.declarer.exchange_declare(name, declaration.type, **common)
    else:
        delays.declarer.queue_declare(name, **common)

"""Find problems on RabbitMQ for the command ``delay doctor``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from time import sleep
from typing import Any

from amqp.exceptions import AccessRefused, NotFound

from ...errors import ManagementUnavailable
from ...finding import ADVICE, UNCHECKED, WRONG, Finding
from .delays import RabbitDelays
from .management import ManagementAPI, overriding_policies, refusing_findings
from .mirror import blueprint
from .status import RabbitStatus, status
from .topology import Binding, Declaration, Exchange, Queue, Topology

#: Messages of a queue that RabbitMQ dead-letters at a time: the default of
#: dead_letter_worker_consumer_prefetch.
DEAD_LETTERED_AT_ONCE = 32

#: Seconds until the management API has counted messages again; it counts every 5 s.
COUNTED_ANEW_SECONDS = 6.0

#: The advice for a missing queue or exchange, by ``native_delay_declare``.
_WAYS_OUT = {
    True: "start an installed worker, or run `celery -A PROJ delay declare`",
    False: "run `celery -A PROJ delay declare` as a user who may declare",
}

_HELD_UP = (
    "bind a queue to the destination exchange, or make room in the queue that rejects them; "
    "see `celery -A PROJ delay status`"
)


def verify(delays: RabbitDelays, api: ManagementAPI, queues: Sequence[Any] = ()) -> list[Finding]:
    """Find missing or wrong queues, exchanges, bindings and policies on RabbitMQ."""
    topology = delays.topology
    plan = list(topology.plan()) if topology.settings.declare else blueprint(topology, queues)
    try:
        found = [*_compare(topology, plan, api), *overriding_policies(api, topology)]
        return [
            *_by_rights(delays, found),
            *refusing_findings(api, topology),
            *_of_others(topology, api),
        ]
    except ManagementUnavailable as exc:
        unchecked = Finding.of_sentence("delay levels", UNCHECKED, f"levels and policies: {exc}")
        return [unchecked, *_by_rights(delays, list(_missing(delays, plan)))]


def _by_rights(delays: RabbitDelays, found: list[Finding]) -> list[Finding]:
    """Replace the findings that a missing right of the user explains by one that names the right.

    Without ``native_delay_declare``, the user needs fewer rights, and lacks none of them here.
    """
    topology, connection = delays.topology, delays.connection
    if not topology.settings.declare:
        return found
    refused = delays.declarer.refused_rights()
    missing = [each for each in found if each.remedy == _WAYS_OUT[True]]
    # RabbitMQ 4.3 needs this right even for the question whether a queue exists.
    is_declared = delays.declarer.has_exchange(topology.ready_exchange, if_refused=False)
    if is_declared and not missing and "configure" in refused:
        refused.remove("configure")  # another user has declared everything
    if not refused:
        return found
    names = f"^{topology.settings.namespace}\\."
    problem = (
        f"user {delays.declarer.user!r} may not {' or '.join(refused)} {names} on the virtual host "
        f"{connection.virtual_host!r}"
    )
    if "configure" in refused and missing:
        problem += f", and {len(missing)} of its queues, exchanges and bindings do not exist"
        found = [each for each in found if each not in missing]
    way_out = f"grant {' and '.join(refused)} on {names} (rabbitmqctl set_permissions)"
    if refused == ["configure"]:
        way_out += ", or let a user who has it run `celery -A PROJ delay declare`"
    return [Finding("permissions", WRONG, problem, way_out), *found]


def _of_others(topology: Topology, api: ManagementAPI) -> Iterator[Finding]:
    """Name the queues of this namespace that another release, or another layout, has declared."""
    names = api.names("queues", containing=f"{topology.settings.namespace}.v")
    if old := list(filter(topology.is_left_over, names)):
        yield Finding(
            "old queues",
            ADVICE,
            f"{len(old)} queue(s) of another release, such as {old[0]}",
            "when no app uses them and they are empty, delete them",
        )


def examine(delays: RabbitDelays, api: ManagementAPI, found: RabbitStatus) -> list[Finding]:
    """Find due messages of the counts *found* that stay in dead-lettering."""
    findings = []
    if suspected := _held_up(found):
        # Messages that were only passing through are gone at the next count.
        sleep(COUNTED_ANEW_SECONDS)
        findings += [
            Finding("dead-lettering", WRONG, f"{queue} {held}", _HELD_UP)
            for queue, held in _held_up(status(delays, api)).items()
            if queue in suspected
        ]
    if found.stuck is None:
        problem = "messages stuck between two levels: the management API does not answer"
        way_out = "see delay levels"
        findings.append(Finding("dead-lettering", UNCHECKED, problem, way_out))
    return findings


def _held_up(found: RabbitStatus) -> dict[str, str]:
    levels = {
        level.queue: f"has {level.stuck} message(s) stuck in dead-lettering: others cannot pass"
        for level in found.levels
        if (level.stuck or 0) >= DEAD_LETTERED_AT_ONCE
    }
    return levels | {
        landing.queue: f"holds {landing.held} message(s): their destination rejects them"
        for landing in found.landings
    }


def _compare(
    topology: Topology, plan: Sequence[Declaration], api: ManagementAPI
) -> Iterator[Finding]:
    way_out = _WAYS_OUT[topology.settings.declare]
    exchanges, queues = (
        {item["name"]: item for item in api.named(kind, f"{topology.space}.")}
        for kind in ("exchanges", "queues")
    )
    bound: dict[str, set[tuple[str, str, str]]] = {}
    for declaration in plan:
        match declaration:
            case Exchange(name, kind, arguments):
                there = exchanges.get(name)
                yield from _differing(name, "exchange", there, {"type": kind}, arguments, way_out)
            case Queue(name, arguments):
                yield from _differing(name, "queue", queues.get(name), {}, arguments, way_out)
            case Binding(source, destination, routing_key, to_exchange):
                kind, ends = ("exchange", exchanges) if to_exchange else ("queue", queues)
                is_ours = destination.startswith(f"{topology.space}.")
                if source not in exchanges or (is_ours and destination not in ends):
                    continue  # the missing exchange or queue was named
                if source not in bound:
                    bound[source] = {
                        (item["destination_type"], item["destination"], item["routing_key"])
                        for item in api.bindings_from(source)
                    }
                if (kind, destination, routing_key) not in bound[source]:
                    problem = f"{source}: not bound to {destination} with {routing_key}"
                    yield _finding(problem, way_out)


def _missing(delays: RabbitDelays, plan: Sequence[Declaration]) -> Iterator[Finding]:
    """Find missing exchanges and queues over AMQP, without the management API."""
    for declaration in plan:
        if isinstance(declaration, Binding) or not delays.declarer.can_name(declaration.name):
            continue
        name, kind = declaration.name, type(declaration).__name__.lower()
        try:
            if isinstance(declaration, Exchange):
                delays.declarer.look_for_exchange(name)
            elif delays.declarer.depth(name) is None:
                raise NotFound
        except NotFound:
            yield _finding(f"{name}: {kind} is missing", _WAYS_OUT[delays.settings.declare])
        except AccessRefused:
            continue


def _differing(
    name: str,
    what: str,
    there: dict[str, Any] | None,
    fields: dict[str, Any],
    arguments: dict[str, Any],
    way_out: str,
) -> Iterator[Finding]:
    if there is None:
        yield _finding(f"{name}: {what} is missing", way_out)
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
            problem = f"{name}: {key} {found.get(key)!r}, expected {expected.get(key)!r}"
            first = f"delete it when it is empty and {way_out}"
            yield _finding(problem, f"{first}; or choose another native_delay_namespace")


def _finding(problem: str, way_out: str) -> Finding:
    return Finding("delay levels", WRONG, problem, way_out)

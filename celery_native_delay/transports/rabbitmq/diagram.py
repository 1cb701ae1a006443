"""A plan drawn as a Mermaid flowchart: exchanges round, queues square, dead-lettering dotted."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from ...durations import duration
from .topology import Binding, Declaration, Exchange, Queue


def mermaid(plan: Iterable[Declaration], *, shorten: str = "") -> str:
    """The flowchart of *plan*; *shorten* is left out of every name."""
    return "\n".join(["flowchart LR", *(f"    {line}" for line in _lines(list(plan), shorten))])


def _lines(plan: list[Declaration], shorten: str) -> Iterator[str]:
    linked = {name for d in plan if isinstance(d, Binding) for name in (d.source, d.destination)}
    exchange_ids: dict[str, str] = {}
    queue_ids: dict[str, str] = {}
    for declaration in plan:
        match declaration:
            case Exchange(name) if name in linked:
                exchange_ids[name] = f"x{len(exchange_ids)}"
                yield f'{exchange_ids[name]}(["{name.removeprefix(shorten)}"])'
            case Queue(name, arguments):
                queue_ids[name] = f"q{len(queue_ids)}"
                ttl_ms = arguments.get("x-message-ttl")
                waits = "" if ttl_ms is None else f"<br>{duration(ttl_ms / 1000, exact=True)}"
                yield f'{queue_ids[name]}["{name.removeprefix(shorten)}{waits}"]'
    for declaration in plan:
        match declaration:
            case Binding(source, destination, routing_key, to_exchange):
                end = (exchange_ids if to_exchange else queue_ids)[destination]
                label = f'|"{routing_key}"|' if routing_key else ""
                yield f"{exchange_ids[source]} -->{label} {end}"
            case Queue(name, arguments) if "x-dead-letter-exchange" in arguments:
                after = exchange_ids[arguments["x-dead-letter-exchange"]]
                yield f"{queue_ids[name]} -.->|expired| {after}"
            case Exchange(name, _, arguments) if "alternate-exchange" in arguments:
                if name in exchange_ids:
                    parks = exchange_ids[arguments["alternate-exchange"]]
                    yield f"{exchange_ids[name]} -.->|unroutable| {parks}"

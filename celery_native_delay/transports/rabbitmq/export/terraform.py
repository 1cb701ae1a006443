"""A module for Terraform, with the provider cyrilgdn/rabbitmq.

The delay levels are expressions over a table of them, as a person would write it, in ``delays.tf``;
all else of the plan is in tables, and so is what a later plan may add. That both are the plan,
whatever the settings, is what the tests evaluate.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from importlib.resources import files
from typing import Any

from ..blueprint import Blueprint
from ..topology import Binding, Exchange, Queue, Topology
from .quoting import escaped

#: What the bindings of delays depend on.
_BOUND = ["rabbitmq_exchange.delay", "rabbitmq_queue.delay"]
_OWN_BOUND = ["rabbitmq_queue.own"]

#: In a template: a name between two at signs, with lines in its place if it has the line to itself.
_PLACE = re.compile(r"^( *)@(\w+)@\n|@(\w+)@", re.M)


def terraform(plan: Blueprint, vhost: str) -> str:
    """The module, one file."""
    topology = plan.topology
    names = _Names(topology)
    by_levels = _ByLevels(topology)
    others = [declaration for declaration in plan.delays() if not by_levels(declaration)]
    exchanges = [each for each in others if isinstance(each, Exchange)]
    # Made last, as a producer that sees them relies on the rest.
    mark = topology.ready_exchange
    module = _filled(
        "delays.tf",
        {
            "vhost": f'"{_text(vhost)}"',
            "namespace": f'"{_text(topology.settings.namespace)}"',
            "version": topology.space.rpartition(".")[2],
            "shape": topology.name.removeprefix(f"{topology.space}."),
            "resolution_ms": str(topology.resolution_ms),
            "bits": str(topology.bit_count),
            "levels": by_levels.table(),
            "level_arguments": by_levels.arguments(names),
            "exchanges": _exchanges(names, [e for e in exchanges if e.name != mark]),
            "queues": _queues(names, others),
            "bindings": _bindings(names, others),
            "bound": ", ".join(_BOUND + (_OWN_BOUND if plan.own else [])),
            "ready": names.value([mark]),
        },
    )
    return f"{module}\n{_own(names, plan)}" if plan.own else module


def _own(names: _Names, plan: Blueprint) -> str:
    with_arguments = any(isinstance(each, Binding) and each.arguments for each in plan.own)
    arguments = ["arguments_json   = jsonencode(each.value.arguments)"] if with_arguments else []
    return _filled(
        "own_queues.tf",
        {
            "exchanges": _exchanges(names, plan.own),
            "queues": _queues(names, plan.own),
            "bindings": _bindings(names, plan.own, with_arguments=with_arguments),
            "arguments": arguments,
        },
    )


def _filled(template: str, values: Mapping[str, str | list[str]]) -> str:
    def value(place: re.Match[str]) -> str:
        indent, lines, word = place.groups()
        if word is not None:
            return str(values[word])
        return "".join(f"{indent}{line}\n" for line in values[lines])

    return _PLACE.sub(value, files(__package__).joinpath(template).read_text())


class _ByLevels:
    """The declarations that the expressions over the table of levels stand for."""

    def __init__(self, topology: Topology) -> None:
        self._topology = topology
        self._exchanges = {topology.level_exchange(level.lowest) for level in topology.levels[:-1]}
        self._exchanges |= {hop.entry for hop in topology.level_queues}
        self._queues = {hop.queue for hop in topology.level_queues}

    def __call__(self, declaration: Exchange | Queue | Binding) -> bool:
        """True if it is one of them."""
        match declaration:
            case Queue(name):
                return name in self._queues
            case Exchange(name) | Binding(name):
                return name in self._exchanges

    def table(self) -> list[str]:
        """The lines of the table."""
        topology, lines, below = self._topology, [], "delivery"
        for level in topology.levels:
            exchange = topology.level_exchange(level.lowest)
            name = exchange.removeprefix(f"{topology.name}.")
            fused = "false" if exchange in self._queues else "true"
            lines.append(
                f'{{ name = "{name}", bit = {level.lowest}, width = {level.width}, '
                f'fused = {fused}, next = "{below}" }},'
            )
            below = name
        return lines

    def arguments(self, names: _Names) -> list[str]:
        """The lines of a level queue's arguments."""
        expressions = {
            "x-message-ttl": "queue.ttl_ms",
            "x-dead-letter-exchange": '"${local.set}.${queue.next}"',
        }
        first = next(
            each
            for each in self._topology.plan()
            if isinstance(each, Queue) and each.name in self._queues
        )
        return _aligned(
            (names.value(key), expressions.get(key) or names.value(value))
            for key, value in first.arguments.items()
        )


class _Names:
    """Values as HCL has them; in our own names the variable namespace stands for itself."""

    def __init__(self, topology: Topology) -> None:
        self._references = {topology.name: "${local.set}", topology.space: "${local.space}"}
        self._any_delay = "*." * topology.bit_count

    def routing_key(self, key: str) -> str:
        """A routing key, of which the words for the bits are left to a reference."""
        if key.startswith(self._any_delay):
            return f'"${{local.any_delay}}{_text(key.removeprefix(self._any_delay))}"'
        return self.value(key)

    def value(self, value: Any) -> str:
        match value:
            case str():
                for prefix, reference in self._references.items():
                    if value.startswith(f"{prefix}."):
                        return f'"{reference}{_text(value.removeprefix(prefix))}"'
                return f'"{_text(value)}"'
            case dict():
                pairs = ", ".join(f"{self.value(k)} = {self.value(v)}" for k, v in value.items())
                return f"{{ {pairs} }}" if pairs else "{}"
            case list() | tuple():
                return f"[{', '.join(map(self.value, value))}]"
            case None:
                return "null"
        return str(value).lower() if isinstance(value, bool) else str(value)


def _text(text: str) -> str:
    """Text between quotes, with nothing in it that is a template."""
    return escaped(text).replace("${", "$${").replace("%{", "%%{")


def _exchanges(names: _Names, found: Iterable[Any]) -> list[str]:
    return _aligned(
        (
            names.value(each.name),
            f'{{ type = "{_text(each.type)}", arguments = {names.value(each.arguments)} }}',
        )
        for each in found
        if isinstance(each, Exchange)
    )


def _queues(names: _Names, found: Iterable[Any]) -> list[str]:
    lines = []
    for each in found:
        if isinstance(each, Queue):
            arguments = _aligned(
                (names.value(key), names.value(value)) for key, value in each.arguments.items()
            )
            body = ["{", *(f"  {line}" for line in arguments), "}"] if arguments else ["{}"]
            lines += [f"{names.value(each.name)} = {body[0]}", *body[1:]]
    return lines


def _bindings(names: _Names, found: Iterable[Any], *, with_arguments: bool = False) -> list[str]:
    lines = []
    for each in found:
        if isinstance(each, Binding):
            values = {
                "source": names.value(each.source),
                "destination": names.value(each.destination),
                "type": '"exchange"' if each.to_exchange else '"queue"',
                "routing_key": names.routing_key(each.routing_key),
            }
            if with_arguments:
                values["arguments"] = names.value(each.arguments)
            pairs = _aligned(values.items())
            lines += ["{", *(f"  {line}" for line in pairs), "},"]
    return lines


def _aligned(pairs: Iterable[tuple[str, str]]) -> list[str]:
    """Lines of assignments as ``terraform fmt`` lays them out."""
    known = list(pairs)
    width = max((len(key) for key, _ in known), default=0)
    return [f"{key:<{width}} = {value}" for key, value in known]

"""Pictures for people, in which all queues of a level are one box.

What a picture shows is decided once; DOT and Mermaid only write it down.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from urllib.parse import unquote

from ....durations import duration
from ..address import queue_address
from ..blueprint import Blueprint
from ..topology import Binding, Level, Queue, Topology
from .quoting import escaped, quoted

_LEVELS_TITLE = "delay levels: those whose bits are all 0 are passed over"

#: The frames of a box, by what it is.
_DOT_SHAPES = {"queue": "box", "exchange": "ellipse", "other": "plaintext"}
_MERMAID_SHAPES = {"queue": ("[", "]"), "exchange": ("([", "])"), "other": (">", "]")}


@dataclass(frozen=True)
class _Box:
    """A box with so many lines of text."""

    kind: str
    lines: tuple[str, ...]


@dataclass
class _Picture:
    """Boxes by name, levels first, and arrows between them with the lines that stand at each."""

    title: str
    levels: dict[str, _Box] = field(default_factory=dict)
    boxes: dict[str, _Box] = field(default_factory=dict)
    arrows: dict[tuple[str, str], list[str]] = field(default_factory=dict)

    @property
    def ids(self) -> dict[str, str]:
        """A short word for each box."""
        return {name: f"n{number}" for number, name in enumerate([*self.levels, *self.boxes])}

    def box(self, name: str, kind: str, *lines: str) -> None:
        self.boxes.setdefault(name, _Box(kind, lines or (name,)))

    def arrow(self, start: str, end: str, label: str = "") -> None:
        labels = self.arrows.setdefault((start, end), [])
        labels += [label] if label and label not in labels else []


def dot(plan: Blueprint, vhost: str) -> str:
    """The picture for Graphviz."""
    picture = _picture(plan, vhost)
    ids = picture.ids

    def text(lines: tuple[str, ...] | list[str]) -> str:
        return '"' + "\\n".join(map(escaped, lines)) + '"'

    def boxes(found: dict[str, _Box]) -> list[str]:
        return [
            f"{ids[name]} [shape={_DOT_SHAPES[box.kind]}, label={text(box.lines)}];"
            for name, box in found.items()
        ]

    lines = [
        "digraph delays {",
        f"  label={text([picture.title])}; labelloc=t;",
        '  node [fontname="sans-serif"]; edge [fontname="sans-serif", fontsize=10];',
        "  subgraph cluster_levels {",
        f"    label={text([_LEVELS_TITLE])}; style=rounded;",
        *(f"    {box}" for box in boxes(picture.levels)),
        "  }",
        *(f"  {box}" for box in boxes(picture.boxes)),
    ]
    for (start, end), labels in picture.arrows.items():
        label = f" [label={text(labels)}]" if labels else ""
        lines.append(f"  {ids[start]} -> {ids[end]}{label};")
    return "\n".join([*lines, "}", ""])


def mermaid(plan: Blueprint, vhost: str) -> str:
    """The picture as Markdown pages of GitHub and GitLab show it, in a fence named mermaid."""
    picture = _picture(plan, vhost)
    ids = picture.ids

    def text(lines: tuple[str, ...] | list[str]) -> str:
        # Of the characters that mean something there: https://mermaid.js.org/syntax/flowchart.html
        codes = str.maketrans({char: f"#{ord(char)};" for char in '#"<>&`\\'})
        return '"' + "<br>".join(line.translate(codes) for line in lines) + '"'

    def boxes(found: dict[str, _Box]) -> list[str]:
        frames = [(_MERMAID_SHAPES[box.kind], box.lines) for box in found.values()]
        return [
            f"{ids[name]}{left}{text(lines)}{right}"
            for name, ((left, right), lines) in zip(found, frames, strict=True)
        ]

    lines = [
        "---",
        f"title: {quoted(picture.title)}",
        "---",
        "flowchart TB",
        f"  subgraph levels[{text([_LEVELS_TITLE])}]",
        *(f"    {box}" for box in boxes(picture.levels)),
        "  end",
        *(f"  {box}" for box in boxes(picture.boxes)),
    ]
    for (start, end), labels in picture.arrows.items():
        lines.append(f"  {ids[start]} -->{f'|{text(labels)}|' if labels else ''} {ids[end]}")
    return "\n".join([*lines, ""])


def _picture(plan: Blueprint, vhost: str) -> _Picture:
    topology = plan.topology
    picture = _Picture(f"{topology.name} in the virtual host {vhost}")
    delivery = topology.delivery_exchange
    way = [topology.level_exchange(level.lowest) for level in reversed(topology.levels)]
    for name, level in zip(way, reversed(topology.levels), strict=True):
        picture.levels[name] = _level(topology, name, level)
    picture.box("", "other", "producer")
    picture.arrow("", way[0], "enters at the highest bit that is set")
    picture.box(delivery, "exchange", "delivery")
    for start, end in zip(way, [*way[1:], delivery], strict=True):
        picture.arrow(start, end)
    picture.box(topology.parking_queue, "queue", "parked")
    picture.arrow(delivery, topology.parking_queue, "no queue is bound")
    _deliveries(plan, picture)
    return picture


def _level(topology: Topology, name: str, level: Level) -> _Box:
    waits = [step * topology.resolution_ms / 1000 for step in level.steps]
    first, last = (duration(wait, exact=wait < 60) for wait in (waits[0], waits[-1]))
    spans = f"{len(waits)} queues: {first} to {last}" if len(waits) > 1 else first
    return _Box("queue", (name.removeprefix(f"{topology.name}."), spans))


def _deliveries(plan: Blueprint, picture: _Picture) -> None:
    """Draw the ways from the delivery exchange to the app's queues."""
    topology = plan.topology
    delivery, any_delay = topology.delivery_exchange, topology.delivery_pattern("")
    for queue in plan.surroundings:
        if isinstance(queue, Queue):
            picture.box(queue.name, "queue", queue.name.removeprefix(f"{topology.name}."))
            exchange = queue.arguments["x-dead-letter-exchange"]
            if exchange != delivery:
                picture.box(f"{exchange} exchange", "exchange", exchange)
                picture.arrow(queue.name, f"{exchange} exchange")
    for binding in plan.surroundings:
        if isinstance(binding, Binding):
            queue_name = binding.destination
            picture.box(queue_name, "queue")
            address = binding.routing_key.removeprefix(any_delay)
            if address == queue_address(queue_name):
                picture.arrow(topology.queue_landing_queue(queue_name), queue_name)
            else:
                picture.arrow(delivery, queue_name, _told(address))
    for binding in plan.own:
        if isinstance(binding, Binding) and f"{binding.source} exchange" in picture.boxes:
            picture.box(binding.destination, "queue")
            picture.arrow(f"{binding.source} exchange", binding.destination, binding.routing_key)


def _told(address: str) -> str:
    """Exchange and routing key of an address; nothing of one that is a queue's name, or ours."""
    exchange, _, routing_key = address.removeprefix("%").partition(".")
    return f"{unquote(exchange)}: {unquote(routing_key)}" if exchange[:1] not in ("", "%") else ""

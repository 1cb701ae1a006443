"""Pictures of the delay levels, drawn from the plan: SVG in the colours of the page around it."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape
from typing import TypeAlias

from celery_native_delay.durations import duration
from celery_native_delay.settings import TTL_EXTRA_MS
from celery_native_delay.transports.rabbitmq.topology import (
    Binding,
    Declaration,
    Exchange,
    Queue,
    Topology,
)

#: Of a box, from one box to the next, and where the row and the parking queue are.
WIDTH, HEIGHT, STEP, ROW, LOWEST = 84, 40, 124, 130, 285

Node: TypeAlias = tuple[str, str]

_MARKER = (
    '<defs><marker id="{id}" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" '
    'markerUnits="userSpaceOnUse" orient="auto"><path d="M0 0 8 4 0 8z"/></marker></defs>'
)


def levels_svg(plan: Iterable[Declaration], *, shorten: str = "") -> str:
    """All exchanges and queues of *plan* that a message meets, highest level to the left.

    *shorten* is left out of every name.
    """
    return _Picture(list(plan), shorten).svg()


def path_svg(topology: Topology, seconds: float) -> str:
    """The waits of a message that is due in so many *seconds*, one after the other."""
    hops = topology.path(round(seconds * 1000 / topology.resolution_ms))
    boxes: list[tuple[str, float | None]] = [
        (hop.queue.removeprefix(f"{topology.name}."), hop.delay_ms / 1000) for hop in hops
    ]
    parts = [_MARKER.format(id="path-arrow"), _box("exchange", 50, 40, "producer")]
    x = 50
    boxes += [("delivery", None), ("celery", None)]
    for place, (name, ttl_seconds) in enumerate(boxes):
        kind = "expired" if 0 < place <= len(hops) else "binding"
        parts.append(_arrow(x + WIDTH / 2, 40, x + STEP - WIDTH / 2, 40, kind, "path-arrow"))
        x += STEP
        waits = "" if ttl_seconds is None else duration(ttl_seconds, exact=True)
        parts.append(_box("exchange" if name == "delivery" else "queue", x, 40, name, waits))
    label = f"{duration(seconds, exact=True)} in {len(hops)} hops"
    return _svg(x + 50, 80, label, parts)


class _Picture:
    """One row of queues and exchanges, entries above, the parking queue below.

    A node is ("x", name) or ("q", name): some queues and exchanges have one name.
    """

    def __init__(self, plan: list[Declaration], shorten: str) -> None:
        self._shorten = shorten
        self._queues = {item.name: item for item in plan if isinstance(item, Queue)}
        self._exchanges = {item.name: item for item in plan if isinstance(item, Exchange)}
        self._bindings = [
            (("x", b.source), ("x" if b.to_exchange else "q", b.destination), b.routing_key)
            for b in plan
            if isinstance(b, Binding)
        ]
        self._at: dict[Node, tuple[float, float]] = {}
        self._place()

    def _place(self) -> None:
        """The row is the way of a message that waits in every level."""
        levels = [queue for queue in self._queues.values() if "x-message-ttl" in queue.arguments]
        levels.sort(key=lambda queue: -queue.arguments["x-message-ttl"])
        row: list[Node] = []
        for queue in levels:
            row += [("q", queue.name), ("x", queue.arguments["x-dead-letter-exchange"])]
        row += [end for start, end, _ in self._bindings if start == row[-1]]
        self._at = {node: (50 + STEP * column, ROW) for column, node in enumerate(row)}
        (parking,) = {
            exchange.arguments["alternate-exchange"]
            for exchange in self._exchanges.values()
            if "alternate-exchange" in exchange.arguments
        }
        x = self._at[row[-2]][0]
        self._at |= {("x", parking): (x, LOWEST), ("q", parking): (x + STEP, LOWEST)}
        for start, end, _ in self._bindings:
            if start not in self._at:
                self._at[start] = (self._at[end][0], 30)
        self._right = x + STEP + 50

    def svg(self) -> str:
        parts = [_MARKER.format(id="arrow")]
        for start, end, key in self._bindings:
            parts.append(self._arrow(start, end, "binding", key))
        parts += [
            self._arrow(("q", queue.name), ("x", after), "expired")
            for queue in self._queues.values()
            if (after := queue.arguments.get("x-dead-letter-exchange"))
        ]
        parts += [
            self._unroutable(("x", exchange.name), ("x", parks))
            for exchange in self._exchanges.values()
            if (parks := exchange.arguments.get("alternate-exchange"))
        ]
        for (kind, name), at in self._at.items():
            ttl_ms = self._queues[name].arguments.get("x-message-ttl") if kind == "q" else None
            waits = "" if ttl_ms is None else duration((ttl_ms - TTL_EXTRA_MS) / 1000, exact=True)
            shown = name.removeprefix(self._shorten).rpartition(".v1.")[2]
            parts.append(_box("queue" if kind == "q" else "exchange", *at, shown, waits))
        label = "the exchanges, queues and bindings of three delay levels"
        return _svg(self._right, LOWEST + 30, label, parts)

    def _arrow(self, start: Node, end: Node, kind: str, key: str = "") -> str:
        (x1, y1), (x2, y2) = self._at[start], self._at[end]
        steps = round((x2 - x1) / STEP)
        if steps == 0:
            return _arrow(x1, y1 + HEIGHT / 2, x2, y2 - HEIGHT / 2, kind)
        if steps == 1:
            label = _text((x1 + x2) / 2, y1 - 28, key, "key") if key else ""
            return _arrow(x1 + WIDTH / 2, y1, x2 - WIDTH / 2, y2, kind) + label
        lowest = y1 + HEIGHT / 2 + 26 * steps
        path = (
            f"M{x1:g} {y1 + HEIGHT / 2:g}"
            f"C{x1:g} {lowest:g},{x2:g} {lowest:g},{x2:g} {y2 + HEIGHT / 2:g}"
        )
        # The middle of the curve is three quarters of the way down.
        label = _text((x1 + x2) / 2, 0.75 * lowest + 0.25 * (y1 + HEIGHT / 2) + 13, key, "key")
        return _path(path, kind) + label

    def _unroutable(self, start: Node, end: Node) -> str:
        (x1, y1), (x2, y2) = self._at[start], self._at[end]
        if x1 == x2:
            return _arrow(x1 + 20, y1 + HEIGHT / 2, x2 + 20, y2 - HEIGHT / 2, "unroutable")
        return _path(f"M{x1 - 20:g} {y1 + HEIGHT / 2:g}V{y2:g}H{x2 - WIDTH / 2:g}", "unroutable")


def _svg(width: float, height: float, label: str, parts: list[str]) -> str:
    return (
        f'<svg viewBox="0 0 {width:g} {height:g}" role="img" aria-label="{escape(label)}">'
        f"<title>{escape(label)}</title>{''.join(parts)}</svg>"
    )


def _box(kind: str, x: float, y: float, name: str, below: str = "") -> str:
    radius = 4 if kind == "queue" else HEIGHT / 2
    rect = (
        f'<rect class="{kind}" x="{x - WIDTH / 2:g}" y="{y - HEIGHT / 2:g}" width="{WIDTH}" '
        f'height="{HEIGHT}" rx="{radius:g}"/>'
    )
    size = "" if len(name) < 12 else "small"
    if not below:
        return rect + _text(x, y + 4, name, size)
    return rect + _text(x, y - 3, name, size) + _text(x, y + 12, below, "small")


def _text(x: float, y: float, text: str, kind: str = "") -> str:
    return f'<text class="{kind}" x="{x:g}" y="{y:g}" text-anchor="middle">{escape(text)}</text>'


def _arrow(x1: float, y1: float, x2: float, y2: float, kind: str, marker: str = "arrow") -> str:
    return _path(f"M{x1:g} {y1:g}L{x2:g} {y2:g}", kind, marker)


def _path(path: str, kind: str, marker: str = "arrow") -> str:
    return f'<path class="{kind}" d="{path}" marker-end="url(#{marker})"/>'

"""The pictures in the docs are drawn from the plan: all of it, as it is."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from celery_native_delay.settings import DelaySettings
from celery_native_delay.transports.rabbitmq.topology import Binding, Queue, Topology
from tests.documents import ROOT


@pytest.fixture
def drawing(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.syspath_prepend(ROOT / "docs" / "_ext")
    import level_pictures

    yield level_pictures
    del sys.modules["level_pictures"]


def test_every_binding_and_every_dead_lettering_is_an_arrow(drawing: Any) -> None:
    """Three levels of a second, none fused, and one queue bound to a topic exchange."""
    topology = Topology(DelaySettings(levels=3, resolution=1, fused_bits=0))
    pattern = topology.delivery_pattern("%shop.emails.#")
    emails = [Queue("emails"), Binding(topology.delivery_exchange, "emails", pattern)]
    svg = drawing.levels_svg([*topology.plan(), *emails], shorten=f"{topology.name}.")
    kinds = re.findall(r'<path class="(\w+)"', svg)
    # Entries, two levels, parked, emails.
    assert kinds.count("binding") == 3 + 3 + 2 + 1 + 1
    assert kinds.count("expired") == 3
    assert kinds.count("unroutable") == 3
    assert svg.count('class="queue"') == 3 + 1 + 1
    texts = re.findall(r">([^<]+)</text>", svg)
    assert {"4 s", "2 s", "1 s", "emails", "parked", "delivery"} <= set(texts)
    assert {"*.1.*.#", "*.0.1.#", "*.0.0.#", "*.*.1.#", "*.*.0.#", pattern} <= set(texts)


@pytest.mark.parametrize(
    ("fused_bits", "waits"),
    [(15, ["1 min 20 s", "10 s"]), (0, ["1 min 4 s", "16 s", "8 s", "2 s"])],
)
def test_the_path_of_a_message_has_all_its_waits(
    drawing: Any, fused_bits: int, waits: list[str]
) -> None:
    svg = drawing.path_svg(Topology(DelaySettings(fused_bits=fused_bits)), 90)
    assert re.findall(r">([^<]+ s)</text>", svg) == waits
    kinds = re.findall(r'<path class="(\w+)"', svg)
    assert kinds == ["binding", *["expired"] * len(waits), "binding"]

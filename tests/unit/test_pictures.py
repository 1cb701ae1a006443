"""The pictures in the docs are drawn from the real plan of the levels and the real rate limiter."""

from __future__ import annotations

import re
from importlib import import_module
from typing import Any

import pytest

from celery_native_delay import Rate
from celery_native_delay.settings import DelaySettings
from celery_native_delay.transports.rabbitmq.topology import Binding, Queue, Topology
from tests.documents import ROOT

pytestmark = pytest.mark.tools


@pytest.fixture
def drawing(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Any:
    """A drawing module of docs/_ext."""
    monkeypatch.syspath_prepend(ROOT / "docs" / "_ext")
    return import_module(request.param)


levels = pytest.mark.parametrize("drawing", ["level_pictures"], indirect=True)


@levels
def test_every_binding_and_every_dead_lettering_is_an_arrow(drawing: Any) -> None:
    """Three delay levels of one second, not fused, and one queue bound to a topic exchange."""
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


@levels
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


@pytest.mark.parametrize("drawing", ["line_pictures"], indirect=True)
def test_tasks_in_the_picture_start_at_the_rate_and_none_during_the_pause(drawing: Any) -> None:
    rate = Rate("4/s", burst=3)
    tasks, held_from, held_until = drawing.spread(rate)
    starts = [at for _, at in tasks]
    assert starts == sorted(starts)
    assert not any(held_from < at < held_until for at in starts)
    for first in starts:
        assert sum(first <= at < first + 1 for at in starts) <= rate.most
    svg = drawing.line_svg(rate)
    assert svg.count('class="starts"') == len(tasks)
    assert svg.count('class="held"') == 1

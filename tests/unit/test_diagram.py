"""The README's picture is drawn from the plan; ``python -m tests.unit.test_diagram`` redraws it."""

from __future__ import annotations

import re
from pathlib import Path

from celery_native_delay.settings import DelaySettings
from celery_native_delay.transports.rabbitmq.diagram import mermaid
from celery_native_delay.transports.rabbitmq.topology import Binding, Queue, Topology

README = Path(__file__).parents[2] / "README.md"
BLOCK = re.compile(
    r"(<!-- diagram: .*? -->\n```mermaid\n)(.*?)(```\n<!-- end of diagram -->)", re.S
)


def diagram() -> str:
    """Three levels of a second, none fused, and one queue bound to a topic exchange."""
    topology = Topology(DelaySettings(levels=3, resolution=1, fused_bits=0))
    pattern = topology.delivery_pattern("%shop.emails.#")
    emails = [Queue("emails"), Binding(topology.delivery_exchange, "emails", pattern)]
    return mermaid([*topology.plan(), *emails], shorten=f"{topology.name}.") + "\n"


def test_the_readme_shows_the_plan_as_it_is() -> None:
    block = BLOCK.search(README.read_text())
    assert block is not None
    assert block.group(2) == diagram()


def test_every_binding_and_every_dead_lettering_is_an_arrow() -> None:
    lines = diagram().splitlines()
    assert (
        sum("-->" in line for line in lines) == 3 + 3 + 2 + 1 + 1
    )  # entries, two levels, parked, emails
    assert sum("|expired|" in line for line in lines) == 3


if __name__ == "__main__":
    README.write_text(BLOCK.sub(lambda m: m.group(1) + diagram() + m.group(3), README.read_text()))

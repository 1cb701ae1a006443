"""A blueprint in the words of the tools that may declare it instead of us. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from ....settings import DelaySettings
from ...exports import ExportAs, Exported
from ..blueprint import Blueprint, blueprint
from ..topology import Topology
from .definitions import definitions
from .kubernetes import kubernetes
from .pictures import dot, mermaid
from .terraform import terraform

FORMATS: dict[str, Callable[[Blueprint, str, str], str]] = {
    "definitions": lambda plan, vhost, _: definitions(plan, vhost),
    "terraform": lambda plan, vhost, _: terraform(plan, vhost),
    "kubernetes": kubernetes,
    "dot": lambda plan, vhost, _: dot(plan, vhost),
    "mermaid": lambda plan, vhost, _: mermaid(plan, vhost),
}


def export(settings: DelaySettings, queues: Sequence[Any], how: ExportAs) -> Exported:
    """All that *settings* and *queues*, of kombu, have on the broker, in the format asked for."""
    plan = blueprint(Topology(settings), queues)
    if not how.own_queues:
        plan = replace(plan, own=())
    kinds = Counter(f"{type(each).__name__.lower()}s" for each in plan.declarations())
    text = FORMATS[how.form](plan, how.vhost or "/", how.cluster)
    return Exported(text, kinds, plan.left_out)

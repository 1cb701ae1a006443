"""A blueprint as RabbitMQ's own JSON: https://www.rabbitmq.com/docs/definitions. Pure.

Every item names its virtual host, as ``rabbitmqctl import_definitions`` and ``POST
/api/definitions`` want it; ``POST /api/definitions/VHOST`` takes the one of its address instead.
The host itself is not in the file: it was made by others, with its permissions and policies.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ...settings import DelaySettings
from ..interface import Exported
from .blueprint import Blueprint, blueprint
from .topology import Binding, Exchange, Queue, Topology


def export(
    settings: DelaySettings, queues: Sequence[Any], vhost: str, *, own_queues: bool = True
) -> Exported:
    """The definitions of all that *settings* and *queues*, of kombu, have on the broker.

    Without *own_queues* the app's own are taken to be there.
    """
    plan = blueprint(Topology(settings), queues)
    if not own_queues:
        plan = replace(plan, own=())
    kinds = Counter(f"{type(each).__name__.lower()}s" for each in plan.declarations())
    return Exported(definitions(plan, vhost), kinds, plan.left_out)


def definitions(plan: Blueprint, vhost: str) -> str:
    """The file, one item in each line."""
    items: dict[str, list[dict[str, Any]]] = {"exchanges": [], "queues": [], "bindings": []}
    lasting = {"vhost": vhost, "durable": True, "auto_delete": False}
    for declaration in plan.declarations():
        match declaration:
            case Exchange(name, kind, arguments):
                item = {"name": name, "type": kind, **lasting, "internal": False}
                items["exchanges"].append(item | {"arguments": arguments})
            case Queue(name, arguments):
                items["queues"].append({"name": name, **lasting, "arguments": arguments})
            case Binding(source, destination, routing_key, to_exchange, arguments):
                item = {
                    "source": source,
                    "vhost": vhost,
                    "destination": destination,
                    "destination_type": "exchange" if to_exchange else "queue",
                    "routing_key": routing_key,
                }
                items["bindings"].append(item | {"arguments": arguments})
    parts = (f' "{kind}": [\n{_lines(found)}\n ]' for kind, found in items.items())
    return "{\n" + ",\n".join(parts) + "\n}\n"


def _lines(items: list[dict[str, Any]]) -> str:
    return ",\n".join(f"  {json.dumps(item, ensure_ascii=False)}" for item in items)

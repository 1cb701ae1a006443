"""Manifests for RabbitMQ's messaging topology operator:
https://www.rabbitmq.com/kubernetes/operator/using-topology-operator."""

from __future__ import annotations

import json
import re
from hashlib import sha256
from typing import Any

from ..blueprint import Blueprint
from ..topology import Binding, Declaration, Exchange, Queue
from .quoting import quoted

_HEAD = """\
# What delayed tasks wait in on RabbitMQ, for celery_native_delay, as its settings ask for it.
# The operator declares it in any order: let producers and workers follow when all of it is ready.
"""

#: Names of objects are at most 253 characters; the rest is for what tells them apart.
_READABLE = 200


def kubernetes(plan: Blueprint, vhost: str, cluster: str) -> str:
    """The manifests; *cluster* is the name of a RabbitmqCluster, or ``namespace/name``."""
    namespace, _, name = cluster.rpartition("/")
    reference = {"name": name} | ({"namespace": namespace} if namespace else {})
    documents = (
        _document(declaration, vhost, cluster, reference) for declaration in plan.declarations()
    )
    return _HEAD + "".join(documents)


def _document(declaration: Declaration, vhost: str, cluster: str, reference: dict[str, str]) -> str:
    kind, readable, spec = _spec(declaration, vhost)
    told = json.dumps([kind, cluster, spec], sort_keys=True).encode()
    slug = re.sub("[^a-z0-9]+", "-", readable.lower())[:_READABLE].strip("-")
    name = f"{slug}-{sha256(told).hexdigest()[:8]}".lstrip("-")
    return "---\n" + _yaml(
        {
            "apiVersion": "rabbitmq.com/v1beta1",
            "kind": kind,
            "metadata": {"name": name},
            "spec": spec | {"rabbitmqClusterReference": reference},
        }
    )


def _spec(declaration: Declaration, vhost: str) -> tuple[str, str, dict[str, Any]]:
    """Kind, readable name and specification of an object."""
    lasting: dict[str, Any] = {"vhost": vhost, "durable": True, "autoDelete": False}
    arguments = dict(declaration.arguments)
    match declaration:
        case Exchange(name, kind):
            spec = {"name": name, "type": kind, **lasting}
        case Queue(name):
            queue_type = arguments.pop("x-queue-type", None)
            spec = {"name": name, **({"type": queue_type} if queue_type else {}), **lasting}
        case Binding(source, destination, routing_key, to_exchange):
            name = f"{source} {destination}"
            spec = {
                "vhost": vhost,
                "source": source,
                "destination": destination,
                "destinationType": "exchange" if to_exchange else "queue",
                "routingKey": routing_key,
            }
    return type(declaration).__name__, name, spec | ({"arguments": arguments} if arguments else {})


def _yaml(values: dict[str, Any], indent: str = "", *, foreign_keys: bool = False) -> str:
    lines = []
    for name, value in values.items():
        key = quoted(name) if foreign_keys else name
        if isinstance(value, dict) and value:
            inner = _yaml(value, f"{indent}  ", foreign_keys=foreign_keys or name == "arguments")
            lines.append(f"{indent}{key}:\n{inner}")
        else:
            lines.append(f"{indent}{key}: {_scalar(value)}\n")
    return "".join(lines)


def _scalar(value: Any) -> str:
    """A value on one line; JSON is YAML as well."""
    return quoted(value) if isinstance(value, str) else json.dumps(value, ensure_ascii=False)

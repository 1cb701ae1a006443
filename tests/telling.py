"""Describe the broker and the workers of a failed test, before teardown removes them."""

from __future__ import annotations

import re

from celery_native_delay.testing import PrivateRabbitMQ
from tests.acceptance.worker import Fleet

_LOG_LINES = 40


def of(fixture: object) -> str:
    """A description of a fixture's value, for brokers and fleets; empty for all others."""
    try:
        if isinstance(fixture, Fleet):
            return held_by_workers(fixture)
        broker = getattr(fixture, "server", fixture)
        if isinstance(broker, PrivateRabbitMQ):
            return held_by_queues(broker)
    except Exception as exc:  # the test's failure is more important
        return f"does not tell: {exc!r}"
    return ""


def held_by_queues(rabbitmq: PrivateRabbitMQ) -> str:
    """The queues with messages or consumers, and the errors in the node's log."""
    if rabbitmq.pid is None:
        return f"RabbitMQ {rabbitmq.version} is down\n{rabbitmq.log_tail(_LOG_LINES)}"
    log = rabbitmq.log_tail(50 * _LOG_LINES).splitlines()
    complaints = [line for line in log if not re.search(r"\[(debug|info|notice)\]", line)]
    lines = []
    for queue in rabbitmq.api("GET", "/queues"):
        held = {
            "ready": queue.get("messages_ready"),
            "unacknowledged": queue.get("messages_unacknowledged"),
            "dead-lettered and not confirmed": queue.get("messages_dlx"),
        }
        told = ", ".join(f"{count} {what}" for what, count in held.items() if count)
        if told or queue.get("consumers") or "messages" not in queue:
            lines.append(
                f"{queue['vhost']} {queue['name']} ({queue.get('state')}): {told or 'nothing'}; "
                f"{queue.get('consumers')} consumer(s)"
            )
    return "\n".join([*lines, "---- of the node's log ----", *complaints[-_LOG_LINES:]])


def held_by_workers(fleet: Fleet) -> str:
    """The tasks that each worker holds in memory, asked by remote control."""
    inspect = fleet.app().control.inspect(timeout=5)
    lines = []
    for kind in ("scheduled", "reserved", "active"):
        for name, tasks in sorted((getattr(inspect, kind)() or {"nobody": []}).items()):
            lines.append(f"{name}: {len(tasks)} {kind}: {tasks[:3]}")
    return "\n".join(lines)

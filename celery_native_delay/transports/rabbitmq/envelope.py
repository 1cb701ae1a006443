"""What is done to a message on its way into the delay levels, and undone on its way out.

Pure: properties and headers in, new ones out; the caller's dicts are never changed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ...core.due_time import due_us
from ...core.errors import CannotDelay, InvalidDueTime
from ...core.topology import is_delay_name

#: The one header we add: what the worker must see again, and when.
HEADER = "native_delay"
VERSION = 1

#: What RabbitMQ writes when it dead-letters. Before 4.0 it believes a publisher who sends them
#: back and drops the message as a cycle (rabbit_dead_letter.erl v3.10; celery#9867).
DEATH_HEADERS = (
    "x-death",
    "x-first-death-exchange",
    "x-first-death-queue",
    "x-first-death-reason",
    "x-last-death-exchange",
    "x-last-death-queue",
    "x-last-death-reason",
)

#: Quorum queues of RabbitMQ 4.0 to 4.2 keep priorities above 4 apart and look for expired
#: messages only at the next one to serve: one of high priority would hold up all others.
HIGHEST_SAFE_PRIORITY = 4


@dataclass(frozen=True)
class Delayed:
    """What a message that waited carries about its wait.

    *delivery_id* is equal only for copies of one delivery; *due_ms* and *expires_ms* are
    milliseconds since the epoch.
    """

    delivery_id: str
    due_ms: int
    exchange: str
    routing_key: str
    expires_ms: int | None = None


def due_of(headers: Mapping[str, Any] | None) -> int | None:
    """The due time in a message's ``eta`` header, microseconds since the epoch, or None.

    Raises:
        InvalidDueTime: a Celery task with an ETA that is not ISO 8601. In other messages an
            ``eta`` that is no date means nothing to us.
    """
    eta = headers.get("eta") if headers else None
    if not eta:
        return None
    try:
        return due_us(eta)
    except (InvalidDueTime, TypeError, AttributeError):
        if headers and "task" in headers:
            raise
        return None


def seal(
    properties: Mapping[str, Any],
    *,
    exchange: str,
    routing_key: str,
    due_us: int,
    now_us: int,
    delivery_id: str,
    limit_priority: bool,
    queue: str | None = None,
) -> dict[str, Any]:
    """The properties with which a message enters the delay levels.

    With *queue* it goes to that queue alone, wherever it was published to once.

    Raises:
        CannotDelay: the message names further routing keys of its own (CC, BCC).
    """
    headers = dict(properties.get("application_headers") or {})
    if "CC" in headers or "BCC" in headers:
        raise CannotDelay(
            f"a message to exchange {exchange!r} with CC or BCC headers cannot wait in the delay "
            f"levels: every level would route a copy for each of them; send one delayed message "
            f"per routing key"
        )
    envelope: dict[str, Any] = {
        "v": VERSION,
        "id": delivery_id,
        "due": -(-due_us // 1000),
        "exchange": exchange,
        "rk": routing_key,
    }
    if queue is not None:
        envelope["queue"] = queue
    deaths = _other_deaths(headers)
    for name in (HEADER, *DEATH_HEADERS):
        headers.pop(name, None)
    if deaths:
        envelope["deaths"] = deaths
    sealed = dict(properties)
    expiration = sealed.pop("expiration", None)
    if expiration is not None:
        # RabbitMQ would cut the first level short by it and then drop it: min(queue, message)
        # TTL, removed when dead-lettering. https://www.rabbitmq.com/docs/ttl
        envelope["expiration"] = expiration
        envelope["expires"] = now_us // 1000 + int(expiration)
    priority = sealed.get("priority")
    if limit_priority and priority and priority > HIGHEST_SAFE_PRIORITY:
        envelope["priority"] = priority
        sealed["priority"] = HIGHEST_SAFE_PRIORITY
    headers[HEADER] = envelope
    sealed["application_headers"] = headers
    return sealed


def unseal(
    properties: Mapping[str, Any], delivery_info: Mapping[str, Any] | None
) -> tuple[dict[str, Any], dict[str, Any], Delayed] | None:
    """Properties and delivery info as of the undelayed message, or None if it never waited."""
    headers = properties.get("application_headers") or {}
    envelope = headers.get(HEADER)
    if not isinstance(envelope, dict) or envelope.get("v") != VERSION:
        return None
    headers = {key: value for key, value in headers.items() if key != HEADER}
    if _deaths_are_ours(headers):
        for name in DEATH_HEADERS:
            headers.pop(name, None)
    headers |= envelope.get("deaths") or {}
    opened = dict(properties)
    opened["application_headers"] = headers
    if "expiration" in envelope:
        opened["expiration"] = envelope["expiration"]
    if "priority" in envelope:
        opened["priority"] = envelope["priority"]
    info = dict(delivery_info or {})
    # The exchange it last entered: a level or the delivery exchange, unless it landed or was
    # rescued; those arrive from the user's own.
    if is_delay_name(info.get("exchange", "")):
        info["exchange"] = envelope["exchange"]
        info["routing_key"] = envelope["rk"]
    delayed = Delayed(
        delivery_id=envelope["id"],
        due_ms=envelope["due"],
        exchange=envelope["exchange"],
        routing_key=envelope["rk"],
        expires_ms=envelope.get("expires"),
    )
    return opened, info, delayed


def _deaths_are_ours(headers: Mapping[str, Any]) -> bool:
    deaths = headers.get("x-death") or []
    return any(is_delay_name(death.get("queue", "")) for death in deaths)


def _other_deaths(headers: Mapping[str, Any]) -> dict[str, Any]:
    """The death headers that other people's queues wrote, to be given back untouched."""
    deaths = [
        death for death in headers.get("x-death") or [] if not is_delay_name(death.get("queue", ""))
    ]
    if not deaths:
        return {}
    kept = {"x-death": deaths}
    for order in ("first", "last"):
        if not is_delay_name(str(headers.get(f"x-{order}-death-queue", ""))):
            names = [f"x-{order}-death-{part}" for part in ("exchange", "queue", "reason")]
            kept |= {name: headers[name] for name in names if name in headers}
    return kept

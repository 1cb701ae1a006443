"""Recognise delay queues of Celery, and read their messages and those of our delay queues."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from secrets import token_hex
from typing import Any

from ...errors import InvalidDueTime
from ...message import Delayed, due_of
from ..moving import Found, Moving, Reach, Stays, derived_id, expires_ms_of
from .address import topic_matches
from .wrapping import unwrap, without_deaths

# ---- Celery's own levels: kombu.transport.native_delayed_delivery ------------------------------

#: The number of Celery's own delay queues. Queue *n* has a TTL of 2**n seconds.
CELERYS_BITS = 28

_CELERYS = re.compile(r"((?:.+_)?celery_delayed_)(\d|1\d|2[0-7])")


def celerys_levels(names: Iterable[str]) -> list[str]:
    """Return the prefixes of Celery's own delay queues in a list of queue names.

    Usually ``celery_delayed_``, which may have a prefix of its own.
    """
    return sorted({match[1] for match in map(_CELERYS.fullmatch, names) if match})


def celerys_queues(levels: str) -> list[str]:
    """Return the names of Celery's delay queues, longest TTL first."""
    return [f"{levels}{number}" for number in reversed(range(CELERYS_BITS))]


def is_celerys_level(name: str) -> bool:
    return _CELERYS.fullmatch(name) is not None


def read_celerys(
    body: bytes,
    properties: Mapping[str, Any],
    info: Mapping[str, Any],
    *,
    now_us: int,
    reaches: Sequence[Reach],
) -> Found:
    """Convert a message from Celery's delay queue to Moving, or to Stays with the reason.

    *info* is the message's delivery info. A message stays if its headers have no ETA, or if
    *reaches* (the app's bindings) do not lead to exactly one exchange.
    """
    whole_key = str(info["routing_key"])
    words = whole_key.split(".", CELERYS_BITS)
    if len(words) <= CELERYS_BITS or not set(words[:CELERYS_BITS]) <= {"0", "1"}:
        return Stays("its routing key is not one of Celery's delayed delivery")
    routing_key = words[CELERYS_BITS]
    exchanges = _exchanges_of(whole_key, routing_key, reaches)
    if len(exchanges) != 1:
        return Stays(_nowhere(routing_key, exchanges))
    headers = dict(properties.get("application_headers") or {})
    try:
        due = due_of(headers)
    except InvalidDueTime as exc:
        return Stays(str(exc))
    if due is None:
        return Stays("it has no ETA in its headers, so only its level knows when it is due")
    own = {**properties, "application_headers": without_deaths(headers, is_celerys_level)}
    delivery_id = derived_id(headers, properties, body, exchanges[0], routing_key)
    delayed = Delayed(
        delivery_id or token_hex(16),
        due,
        exchanges[0],
        routing_key,
        expires_ms=expires_ms_of(own, now_us=now_us),
    )
    return Moving(body, own, delayed, again=bool(info.get("redelivered")))


def _exchanges_of(whole_key: str, routing_key: str, reaches: Iterable[Reach]) -> list[str]:
    """Return the exchanges to which Celery would deliver the message."""
    bound = []
    for each in reaches:
        key = each.routing_key
        pattern = key if key.startswith("#") else f"#.{key}"
        if each.exchange and each.kind != "direct" and topic_matches(pattern, whole_key):
            bound.append(each)
    # Celery's binding key #.<key> also matches longer routing keys, so exact matches win.
    # https://github.com/celery/kombu/blob/v5.7.0/kombu/transport/native_delayed_delivery.py
    exact = {each.exchange for each in bound if topic_matches(each.routing_key, routing_key)}
    return sorted(exact or {each.exchange for each in bound})


def _nowhere(routing_key: str, exchanges: list[str]) -> str:
    if not exchanges:
        return (
            f"no queue of the app is bound for the routing key {routing_key!r}: name it in "
            f"task_queues, with its exchange"
        )
    return (
        f"the routing key {routing_key!r} is bound in the exchanges {', '.join(exchanges)}, and "
        f"Celery would deliver to all of them: run this with an app that has only one of them"
    )


# ---- levels of ours of another namespace -------------------------------------------------------


def read_ours(
    body: bytes, properties: Mapping[str, Any], info: Mapping[str, Any], *, now_us: int = 0
) -> Found:
    """Convert a message from this package's delay queue to Moving, or to Stays with the reason.

    *info* is the message's delivery info.
    """
    own, _, delayed = unwrap(properties, info) or (properties, info, None)
    if delayed is None:
        return Stays("it has no header of this package")
    return Moving(body, own, delayed, again=bool(info.get("redelivered")))


def deliveries_of(properties: Mapping[str, Any]) -> int:
    """Return the delivery count that a quorum queue wrote into the message's headers."""
    headers = properties.get("application_headers") or {}
    return max(int(headers.get(name, 0)) for name in ("x-delivery-count", "x-acquired-count"))

"""Messages that wait on RabbitMQ in other places than our levels: what each is, and for when.

Pure: names, properties and headers in, messages out. The places are the levels of Celery's own
delayed delivery, and earlier sets of ours.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from secrets import token_hex
from typing import Any

from ...due_time import due_us
from ...errors import InvalidDueTime, SettingsError
from ...message import Delayed, due_of
from ...settings import DelaySettings
from ..moving import Found, Moving, Reach, Stays, derived_id, expires_ms_of
from .address import topic_matches
from .topology import VERSION
from .wrapping import unwrap, without_deaths

# ---- Celery's own levels: kombu.transport.native_delayed_delivery ------------------------------

#: Bits of a delay in seconds; so many levels, of 2**level seconds each.
CELERYS_BITS = 28

_CELERYS = re.compile(r"(?:(.+)_)?celery_delayed_(\d|1\d|2[0-7])")


@dataclass(frozen=True)
class CelerysLevels:
    """The names of Celery's own levels with a *prefix*, "" for none."""

    prefix: str = ""

    @property
    def name(self) -> str:
        """The name that all of them go by."""
        return f"{self._beginning}celery_delayed_*"

    @property
    def delivery_exchange(self) -> str:
        """The exchange behind the last level."""
        return f"{self._beginning}celery_delayed_delivery"

    def level(self, number: int) -> str:
        """The queue, and the exchange, of a level."""
        return f"{self._beginning}celery_delayed_{number}"

    @property
    def queues(self) -> list[str]:
        """All of them, longest first: what hops meanwhile is met further down."""
        return [self.level(number) for number in reversed(range(CELERYS_BITS))]

    @property
    def _beginning(self) -> str:
        return f"{self.prefix}_" if self.prefix else ""


def celerys_levels(names: Iterable[str]) -> list[CelerysLevels]:
    """Sets of Celery's own levels among the names of queues, of exchanges as well."""
    matches = map(_CELERYS.fullmatch, names)
    return [CelerysLevels(prefix) for prefix in sorted({m[1] or "" for m in matches if m})]


def is_celerys_level(name: str) -> bool:
    """True if a queue of this name is a level of Celery's own."""
    return _CELERYS.fullmatch(name) is not None


@dataclass(frozen=True)
class Way:
    """A binding of *exchange* behind the delivery exchange: its *pattern* meets the whole key.

    *routing_key* is the user's own, which it was made for.
    """

    exchange: str
    pattern: str
    routing_key: str


def ways_of(reaches: Iterable[Reach]) -> list[Way]:
    """The bindings that Celery makes for the app's queues.

    https://github.com/celery/kombu/blob/v5.7.0/kombu/transport/native_delayed_delivery.py
    """
    return [
        Way(each.exchange, celerys_pattern(each.routing_key), each.routing_key)
        for each in reaches
        if each.exchange and each.kind != "direct"
    ]


def way_of_binding(exchange: str, pattern: str) -> Way:
    """The way that a binding of the delivery exchange to *exchange* stands for."""
    return Way(exchange, pattern, pattern.removeprefix("#."))


def celerys_pattern(routing_key: str) -> str:
    """The key by which Celery binds for *routing_key*, in two places."""
    return routing_key if routing_key.startswith("#") else f"#.{routing_key}"


def read_celerys(
    body: bytes,
    properties: Mapping[str, Any],
    info: Mapping[str, Any],
    *,
    level: int,
    now_us: int,
    ways: Sequence[Sequence[Way]],
) -> Found:
    """A message out of one of Celery's own levels; *info* is how it was delivered.

    Of *ways*, the first that lead anywhere count.
    """
    whole_key = str(info["routing_key"])
    words = whole_key.split(".", CELERYS_BITS)
    if len(words) <= CELERYS_BITS or not set(words[:CELERYS_BITS]) <= {"0", "1"}:
        return Stays("its routing key is none of Celery's delayed delivery")
    routing_key = words[CELERYS_BITS]
    tiers = (_exchanges_of(whole_key, routing_key, tier) for tier in ways)
    exchanges = next(filter(None, tiers), [])
    if len(exchanges) != 1:
        return Stays(_nowhere(routing_key, exchanges))
    headers = dict(properties.get("application_headers") or {})
    late_seconds = None
    try:
        due = due_of(headers)
    except InvalidDueTime as exc:
        return Stays(str(exc))
    if due is None:
        seconds = int("".join(words[:CELERYS_BITS]), 2)
        due, late_seconds = _due_by_key(seconds, level, headers.get("x-death"), now_us)
    own = {**properties, "application_headers": without_deaths(headers, is_celerys_level)}
    delivery_id = derived_id(headers, properties, body, exchanges[0], routing_key)
    delayed = Delayed(
        delivery_id or token_hex(16),
        due,
        exchanges[0],
        routing_key,
        expires_ms=expires_ms_of(own, now_us=now_us),
    )
    return Moving(body, own, delayed, late_seconds, again=bool(info.get("redelivered")))


def _exchanges_of(whole_key: str, routing_key: str, ways: Sequence[Way]) -> list[str]:
    """Exchanges that Celery would deliver to; if several, those that are meant by the key itself.

    Celery's bindings meet every key that ends like theirs, of any exchange.
    """
    behind = [way for way in ways if topic_matches(way.pattern, whole_key)]
    exact = [way for way in behind if topic_matches(way.routing_key, routing_key)]
    return sorted({way.exchange for way in exact or behind})


def _nowhere(routing_key: str, exchanges: list[str]) -> str:
    if not exchanges:
        return (
            f"no queue of the app is bound for the routing key {routing_key!r}: name it in "
            f"task_queues, with its exchange"
        )
    return (
        f"the routing key {routing_key!r} leads to the exchanges {', '.join(exchanges)}, and "
        f"Celery would deliver to all of them: run this with an app that has one of them"
    )


def _due_by_key(seconds: int, level: int, deaths: Any, now_us: int) -> tuple[int, float]:
    """The due time of a message without an ETA, and by how much that may be too late.

    It waits in its level for 2**level seconds, and for the bits below. It came there when it left
    the level before, to the second; into its first at any time within the last 2**level seconds.
    """
    ahead = (1 << level) + seconds % (1 << level)
    left = [
        at if at.tzinfo else at.replace(tzinfo=UTC)
        for death in (deaths if isinstance(deaths, list) else ())
        if isinstance(death, dict) and is_celerys_level(str(death.get("queue")))
        if isinstance(at := death.get("time"), datetime)
    ]
    if left:
        return due_us(max(left)) + (1 + ahead) * 1_000_000, 1.0
    return now_us + ahead * 1_000_000, float(1 << level)


# ---- earlier sets of ours ----------------------------------------------------------------------

_SET = re.compile(
    rf"([A-Za-z0-9_.-]+)\.{VERSION}\.(\d+)x(\d+)ms\.f(\d+)\.(quorum|classic)(?=\.|$)", re.ASCII
)


def sets_of(names: Iterable[str], like: DelaySettings) -> list[DelaySettings]:
    """Settings of each set of levels among the names of queues, in all else *like* those."""
    found: dict[str, DelaySettings] = {}
    for name in names:
        if (match := _SET.match(name)) is None or match[0] in found:
            continue
        namespace, levels, resolution_ms, fused_bits, queue_type = match.groups()
        try:
            found[match[0]] = replace(
                like,
                namespace=namespace,
                levels=int(levels),
                resolution=int(resolution_ms) / 1000,
                fused_bits=int(fused_bits),
                queue_type=queue_type,
            )
        except SettingsError:
            continue  # it only looks like one
    return [found[name] for name in sorted(found)]


def read_ours(body: bytes, properties: Mapping[str, Any], info: Mapping[str, Any]) -> Found:
    """A message out of one of our own levels."""
    own, _, delayed = unwrap(properties, info) or (properties, info, None)
    if delayed is None:
        return Stays("it has no header of ours")
    return Moving(body, own, delayed, again=bool(info.get("redelivered")))


def deliveries_of(properties: Mapping[str, Any]) -> int:
    """Number of times that a quorum queue has had to take a message back."""
    headers = properties.get("application_headers") or {}
    return max(int(headers.get(name, 0)) for name in ("x-delivery-count", "x-acquired-count"))


# ---- what Celery left behind -------------------------------------------------------------------


def foreign_bindings(
    bound: Iterable[tuple[str, str, str]], reaches: Iterable[Reach]
) -> Iterator[tuple[str, str, str]]:
    """Those of the bindings (exchange, queue, routing key) that Celery's delayed delivery added.

    ``#.<key>`` beside the ``<key>`` that a queue is bound by, unless the app has it so itself.
    """
    there = set(bound)
    own = {(each.exchange, each.queue, each.routing_key) for each in reaches}
    for exchange, queue, routing_key in sorted(there - own):
        if routing_key.startswith("#.") and (exchange, queue, routing_key[2:]) in there:
            yield exchange, queue, routing_key

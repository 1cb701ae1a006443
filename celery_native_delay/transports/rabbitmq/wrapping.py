"""Add this package's header to delayed messages, and remove the header on arrival."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import datetime
from operator import itemgetter
from typing import Any

from ...errors import CannotDelay
from ...message import HEADER, Delayed, cancel, due_ms_of, undo_cancel
from .topology import is_delay_name

#: Headers about a message's first and last dead-lettering, by the header with the queue's name.
_FIRST_AND_LAST = {
    f"x-{order}-death-queue": [
        f"x-{order}-death-{part}" for part in ("exchange", "queue", "reason")
    ]
    for order in ("first", "last")
}

_FIRST, _LAST = (frozenset(names) for names in _FIRST_AND_LAST.values())

#: Headers that RabbitMQ adds when it dead-letters. If they are published again, RabbitMQ before
#: 4.0 sees a cycle and drops the message (rabbit_dead_letter.erl v3.10; celery#9867).
DEATH_HEADERS = frozenset({"x-death"}.union(*_FIRST_AND_LAST.values()))

#: Headers that a quorum queue adds to a returned message, and that the next queue must not get.
COUNTED_BY_THE_QUEUE = ("x-delivery-count", "x-acquired-count")

#: A quorum queue of RabbitMQ 4.4 holds a message with this header until the time in the header.
DELIVERY_TIME = "x-opt-delivery-time"

#: Quorum queues of RabbitMQ 4.0 to 4.2 serve priorities above 4 first. These queues only expire the
#: next message to serve. So one message of high priority would block all others.
HIGHEST_SAFE_PRIORITY = 4


def wrap(
    properties: Mapping[str, Any],
    delayed: Delayed,
    *,
    now_us: int,
    limit_priority: bool,
    user: str | None = None,
) -> dict[str, Any]:
    """Return a delayed message's properties, with this package's header added.

    *limit_priority* lowers a priority above 4. If *user* is given, a ``user_id`` other than *user*
    moves into the header. Raises CannotDelay for a header CC or BCC, or for a wrong expiration.
    """
    headers = dict(properties.get("application_headers") or {})
    if "CC" in headers or "BCC" in headers:
        raise CannotDelay(
            f"a message to exchange {delayed.exchange!r} with CC or BCC headers cannot wait in the "
            f"delay levels: every level would route a copy for each of them; send one delayed "
            f"message per routing key"
        )
    wrapped = dict(properties)
    kept: dict[str, Any] = {}
    headers.pop(HEADER, None)
    if not headers.keys().isdisjoint(DEATH_HEADERS):
        if deaths := _users_deaths(headers):
            kept["deaths"] = deaths
        for name in DEATH_HEADERS:
            headers.pop(name, None)
    if DELIVERY_TIME in headers:
        kept["delivery_time"] = headers.pop(DELIVERY_TIME)
    expiration = wrapped.pop("expiration", None)
    if expiration is not None:
        # RabbitMQ would expire the message in its first delay level, and remove the expiration when
        # the message moves to the next level. https://www.rabbitmq.com/docs/ttl
        if not str(expiration).isdecimal():
            raise CannotDelay(f"expected an expiration in milliseconds, got {expiration!r}")
        kept["expiration"] = expiration
        kept["expires"] = delayed.expires_ms or now_us // 1000 + int(expiration)
    if user is not None:
        keep_user_id(wrapped, kept, user)
    priority = wrapped.get("priority")
    if limit_priority and priority and priority > HIGHEST_SAFE_PRIORITY:
        kept["priority"] = priority
        wrapped["priority"] = HIGHEST_SAFE_PRIORITY
    header = delayed.header(kept)
    if delayed.cancelled:
        cancel(headers, header)
    headers[HEADER] = header
    wrapped["application_headers"] = headers
    return wrapped


def keep_user_id(properties: dict[str, Any], header: dict[str, Any], user: str) -> None:
    """Move ``user_id`` from *properties* to *header* if it is not the connection's *user*."""
    # RabbitMQ would close the channel. https://www.rabbitmq.com/docs/validated-user-id
    if properties.get("user_id", user) != user:
        header["user_id"] = properties.pop("user_id")


def unwrap(
    properties: Mapping[str, Any], delivery_info: Mapping[str, Any] | None
) -> tuple[dict[str, Any], dict[str, Any], Delayed | None] | None:
    """Return a message's restored properties and delivery info, and its parsed header.

    Return None if the message has no header of this package. The parsed header is None if the
    message was not delayed: a worker without this package retried a task, and copied the header.
    """
    headers = properties.get("application_headers")
    delayed = Delayed.of(headers.get(HEADER)) if headers else None
    if headers is None or delayed is None:
        return None
    headers = dict(headers)
    header = headers.pop(HEADER)
    opened = dict(properties)
    info = dict(delivery_info or {})
    # The message's last exchange is one of ours. If the message passed a landing queue or was
    # rescued, the last exchange is the user's own.
    ours = is_delay_name(info.get("exchange", ""))
    if not ours and due_ms_of(headers) != header.get("eta", header["due"]):
        # A worker without this package retried the task. The retry has a copy of the header, but
        # was not delayed.
        opened["application_headers"] = _without_our_deaths(headers, {})
        return opened, info, None
    undo_cancel(headers, header)
    if "delivery_time" in header:
        headers[DELIVERY_TIME] = header["delivery_time"]
    opened["application_headers"] = _without_our_deaths(headers, header.get("deaths") or {})
    opened.pop("expiration", None)
    for name in ("expiration", "priority", "user_id"):
        if name in header:
            opened[name] = header[name]
    if ours or delayed.queue is not None:
        info["exchange"], info["routing_key"] = delayed.exchange, delayed.routing_key
    return opened, info, delayed


def _without_our_deaths(headers: dict[str, Any], earlier: Mapping[str, Any]) -> dict[str, Any]:
    """Remove the dead-letter headers of delay queues, and add the *earlier* headers.

    *earlier* contains the dead-letter headers that the user published.
    """
    if not earlier and headers.keys().isdisjoint(DEATH_HEADERS):
        return headers
    kept = without_deaths(headers)
    if not earlier:
        return kept
    later = kept.get("x-death", [])
    if not _FIRST.isdisjoint(earlier):
        kept = {name: kept[name] for name in kept.keys() - _FIRST}
    if not _LAST.isdisjoint(kept):
        earlier = {name: earlier[name] for name in earlier.keys() - _LAST}
    kept |= earlier
    if deaths := later + earlier.get("x-death", []):
        kept["x-death"] = deaths
    return kept


def without_deaths(
    headers: Mapping[str, Any], ours: Callable[[str], bool] = is_delay_name
) -> dict[str, Any]:
    """Return *headers* without the dead-letter headers of queues whose names *ours* accepts."""
    kept = {key: value for key, value in headers.items() if key not in DEATH_HEADERS}
    return kept | _users_deaths(headers, ours)


def _users_deaths(
    headers: Mapping[str, Any], ours: Callable[[str], bool] = is_delay_name
) -> dict[str, Any]:
    deaths = headers.get("x-death")
    kept: dict[str, Any] = {}
    if isinstance(deaths, list):
        theirs = [
            death
            for death in deaths
            if not (isinstance(death, dict) and ours(str(death.get("queue", ""))))
        ]
        if theirs:
            kept["x-death"] = theirs
            if ours(str(headers.get("x-first-death-queue", ""))):
                kept |= _first_death(theirs)
    for queue, names in _FIRST_AND_LAST.items():
        if not ours(str(headers.get(queue, ""))):
            kept |= {name: headers[name] for name in names if name in headers}
    return kept


def _first_death(deaths: list[Any]) -> dict[str, Any]:
    """Return the headers ``x-first-death-*`` for a message's *deaths*, which are newest first."""
    oldest_first = [death for death in reversed(deaths) if isinstance(death, dict)]
    # An entry moves to the front with each death, and keeps the time of its first death.
    times = [death.get("time") for death in oldest_first]
    if all(isinstance(time, datetime) for time in times):
        oldest_first.sort(key=itemgetter("time"))
    parts = ("exchange", "queue", "reason")
    return {
        f"x-first-death-{part}": death[part]
        for death in oldest_first[:1]
        for part in parts
        if part in death
    }

"""Change the arguments, priority, queue or expiry of a waiting task."""

from __future__ import annotations

from base64 import b64decode, b64encode
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

from celery import Celery
from celery.exceptions import QueueNotFound
from celery.utils.saferepr import saferepr
from kombu.compression import compress, decompress
from kombu.exceptions import KombuError
from kombu.serialization import dumps, loads, prepare_accept_content, registry

from ..due_time import due_us
from ..errors import CannotDelay
from ..keyed.record import CALLS, key_and_kind
from ..now import moment, time_ns
from ..records.waiting import HELD
from ..store.entry import StoreEntry
from ..texts import is_text
from .installation import ask_broker


def edit_of(
    app: Celery,
    *,
    args: Sequence[Any] | None,
    kwargs: Mapping[str, Any] | None,
    priority: int | None,
    queue: str | None,
    expires: float | datetime | None,
) -> Callable[[StoreEntry], StoreEntry]:
    """Return a function that changes a waiting message; raise CannotDelay for wrong arguments.

    An argument that is None leaves its part of the message as it is. The queue is declared.
    """
    if args is not None and (isinstance(args, str | bytes) or not isinstance(args, Sequence)):
        raise CannotDelay(f"expected args to be a list, got {args!r}")
    if kwargs is not None and not isinstance(kwargs, Mapping):
        raise CannotDelay(f"expected kwargs to be a dict, got {kwargs!r}")
    if priority is not None and not (type(priority) is int and 0 <= priority <= 255):
        raise CannotDelay(f"expected a priority from 0 to 255, got {priority!r}")
    address = None if queue is None else _declared(app, queue)
    if isinstance(expires, int | float):
        expires = moment(time_ns() // 1000) + timedelta(seconds=expires)
    elif expires is not None and expires.tzinfo is None:
        expires = expires.replace(tzinfo=UTC)

    def edit(entry: StoreEntry) -> StoreEntry:
        entry = entry.moved(entry.due_us)  # refuses what is no task
        headers, properties = dict(entry.headers), dict(entry.properties)
        if expires is not None:
            # A held task has no due time: a release may let it go now.
            starts_us = time_ns() // 1000 if HELD in headers else entry.due_us
            if due_us(expires) <= starts_us:
                which = "now" if HELD in headers else "the due time"
                raise CannotDelay(
                    f"expected expires after {which}, {moment(starts_us).isoformat()}, got "
                    f"{expires.isoformat()}: the task would never run. To end it, cancel it"
                )
            headers["expires"] = expires.isoformat()
            properties.pop("expiration", None)  # workers read the header
            entry = replace(entry, expires_ms=None)
        if priority is not None:
            properties["priority"] = priority
        if args is not None or kwargs is not None:
            old = old_args, old_kwargs, rest = arguments_of(app, entry)
            new_args = old_args if args is None else list(args)
            new_kwargs = old_kwargs if kwargs is None else dict(kwargs)
            if CALLS in old_kwargs and key_and_kind(headers)[1] == "debounce":
                new_kwargs = {CALLS: old_kwargs[CALLS], **new_kwargs}
            check_signature(app, str(headers["task"]), new_args, new_kwargs)
            entry = with_arguments(app, entry, old, (new_args, new_kwargs, rest))
            shown = ("argsrepr", "kwargsrepr")
            headers |= {name: entry.headers[name] for name in shown if name in headers}
        if address is not None:
            entry = _readdressed(entry, properties, *address)
        return replace(entry, properties={**properties, "application_headers": headers})

    return edit


def _declared(app: Celery, name: str) -> tuple[str, str, str]:
    """Declare a queue; return its exchange, routing key and name as ``apply_async`` uses them."""
    try:
        queue = app.amqp.router.expand_destination(name)["queue"]
    except QueueNotFound as exc:
        raise CannotDelay(f"expected a queue of task_queues, got {name!r}: {exc}") from exc
    if not is_text(name):
        raise CannotDelay(f"expected a queue whose name UTF-8 can encode, got {name!r}")
    if queue.exchange.type == "fanout":
        raise CannotDelay(f"expected a queue, got {name!r}, which broadcasts")
    ask_broker(app, lambda channel, _: queue(channel).declare())
    if queue.exchange.type == "direct":
        return "", queue.name, queue.name
    return queue.exchange.name, queue.routing_key, queue.name


def _readdressed(
    entry: StoreEntry, properties: dict[str, Any], exchange: str, routing_key: str, queue: str
) -> StoreEntry:
    if "delivery_tag" not in properties:  # RabbitMQ routes it when it is due
        return replace(entry, exchange=exchange, routing_key=routing_key, queue=None)
    if entry.queue is None:
        raise CannotDelay("expected a task for a queue, got a broadcast: its queue cannot change")
    properties["delivery_info"] = {"exchange": exchange, "routing_key": routing_key}
    return replace(entry, exchange=exchange, routing_key=routing_key, queue=queue)


def arguments_of(app: Celery, entry: StoreEntry) -> tuple[Any, Any, Any]:
    """Return args, kwargs and the third part of a task's body. Raises CannotDelay."""
    known, compression = entry.properties, entry.headers.get("compression")
    data = b64decode(entry.body) if known.get("body_encoding") == "base64" else entry.body
    try:
        data = decompress(data, compression) if compression else data
        accept = prepare_accept_content(app.conf.accept_content)
        content_type, encoding = known.get("content_type"), known.get("content_encoding")
        args, kwargs, rest = loads(data, content_type, encoding, accept=accept)
    except (KombuError, KeyError) as exc:
        raise CannotDelay(f"cannot change the arguments: {type(exc).__name__}: {exc}") from exc
    return args, kwargs, rest


def with_arguments(
    app: Celery, entry: StoreEntry, old: tuple[Any, Any, Any], body: tuple[Any, Any, Any]
) -> StoreEntry:
    """Return the entry with another *body*: args, kwargs and a third part. Raises CannotDelay.

    *old* is its body before. A text that hides the arguments (``argsrepr``) goes on hiding them.
    """
    known, compression = entry.properties, entry.headers.get("compression")
    try:
        _, _, text = dumps(body, registry.type_to_name[known["content_type"]])
    except (KombuError, KeyError) as exc:
        raise CannotDelay(f"cannot change the arguments: {type(exc).__name__}: {exc}") from exc
    made = text.encode() if isinstance(text, str) else text
    made = compress(made, compression)[0] if compression else made
    data = b64encode(made) if known.get("body_encoding") == "base64" else made
    headers = dict(entry.headers)
    longest = {"argsrepr": app.amqp.argsrepr_maxsize, "kwargsrepr": app.amqp.kwargsrepr_maxsize}
    for place, (name, size) in enumerate(longest.items()):
        if _as_list(str(headers.get(name))) == _as_list(saferepr(old[place], size)):
            headers[name] = saferepr(body[place], size)
    return replace(entry, body=data, properties={**known, "application_headers": headers})


def _as_list(text: str) -> str:
    """Return a text of arguments as if its tuples were lists, as a serializer makes of them."""
    return text.replace("(", "[").replace(",)", "]").replace(")", "]")


def check_signature(app: Celery, name: str, args: Any, kwargs: Any) -> None:
    """Raise CannotDelay for arguments that ``apply_async`` would refuse, too."""
    task = app.tasks.get(name)
    if task is None or not task.typing:
        return
    try:
        task.__header__(*args, **kwargs)
    except TypeError as exc:
        raise CannotDelay(f"expected arguments that {name} takes: {exc}") from exc

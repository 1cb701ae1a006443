"""A transport's part for an app, told which queues it is for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

from ..records.opened import Place
from ..settings import DelaySettings
from ..transports.interface import AdminPart, ExpectsQueues, ServesQueues
from .installation import delaying_channel

Part = TypeVar("Part")

#: Seconds for each answer of a broker that is looked at.
TIMEOUT_SECONDS = 5.0

#: Transport options for that; py-amqp takes the first two, redis-py the others, and either passes
#: over what is not its own.
_BOUNDED = {
    "read_timeout": TIMEOUT_SECONDS,
    "write_timeout": TIMEOUT_SECONDS,
    "socket_timeout": TIMEOUT_SECONDS,
    "socket_connect_timeout": TIMEOUT_SECONDS,
}


def bounded_connection(app: Any) -> Any:
    """A connection of *app* to look at its broker, whose every answer has a time limit."""
    return app.connection_for_write(
        connect_timeout=TIMEOUT_SECONDS, transport_options=dict(_BOUNDED)
    )


def records_place(app: Any, settings: DelaySettings) -> Place | None:
    """The place of records of the whole *app*, such as fenced runs; None if none can be kept.

    It is the same in every process and on every virtual host. No broker is asked.
    """
    if settings.records is not None:
        return Place(settings.records, settings.namespace)
    own_records = getattr(app.connection_for_write().transport, "own_records", None)
    return own_records and own_records(settings)


def admin_part(app: Any, connection: Any) -> AdminPart:
    """The admin part for the broker of *connection*, which is one of *app*."""
    channel, settings = delaying_channel(app, connection)
    part: AdminPart = channel.admin_part(settings)
    return serving(part, app)


def serving(part: Part, app: Any, queues: Sequence[str] | None = None) -> Part:
    """*part* itself, which knows now of *queues* if it must; None for all of the app's."""
    if isinstance(part, ExpectsQueues):
        part.expect(list(app.amqp.queues.values()))
    if isinstance(part, ServesQueues):
        part.serve(queues or [queue.name for queue in app.amqp.queues.values()])
    return part

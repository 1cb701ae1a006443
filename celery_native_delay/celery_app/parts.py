"""A transport's part for an app, told which queues it is for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

from ..transports.contract import AdminPart, ServesQueues
from .install import delaying_channel

Part = TypeVar("Part")


def admin_part(app: Any, connection: Any) -> AdminPart:
    """What can be done on the broker of *connection*, which is one of *app*.

    Raises:
        SettingsError, UnsupportedBroker: as :func:`delaying_channel`.
    """
    channel, settings = delaying_channel(app, connection)
    part: AdminPart = channel.admin_part(settings)
    return serving(part, app)


def serving(part: Part, app: Any, queues: Sequence[str] | None = None) -> Part:
    """*part* itself, which knows now of *queues* if it must; None for all of the app's."""
    if isinstance(part, ServesQueues):
        part.serve(queues or [queue.name for queue in app.amqp.queues.values()])
    return part

"""Celery's own ``revoke`` reaches what waits: a subclass of the app's ``Control``.

All of it goes through ``Control.broadcast``: ``app.control.revoke``, ``AsyncResult.revoke``,
``celery control revoke``, Flower's button.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from amqp.exceptions import AMQPError
from celery.utils.log import get_logger
from kombu.exceptions import KombuError

from ..errors import NativeDelayError, NoRecords, UnsupportedBroker
from .delay import Delay
from .installation import installation_of

logger = get_logger(__name__)


class RevokesWaiting:
    """A part of the app's ``Control``, mixed in before its own, that reaches what waits."""

    app: Any

    def broadcast(
        self,
        command: str,
        arguments: dict[str, Any] | None = None,
        destination: Any = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Broadcast; tasks that are revoked everywhere are first cancelled where they wait."""
        everywhere = destination is None and kwargs.get("pattern") is None
        if command in ("revoke", "terminate") and everywhere:
            self._cancel_waiting((arguments or {}).get("task_id"))
        return super().broadcast(command, arguments, destination, *args, **kwargs)  # type: ignore[misc]

    def _cancel_waiting(self, task_ids: Any) -> None:
        ids = _listed(task_ids)
        installation = installation_of(self.app)
        if not ids or installation is None or not installation.enabled:
            return
        try:
            Delay(self.app).cancel_all(ids)
        except (NoRecords, UnsupportedBroker):
            return  # stock Celery, which forgets what it revokes
        except (NativeDelayError, KombuError, AMQPError, OSError) as exc:
            logger.warning(
                "native delay: only what workers hold is revoked, what waits is not: %s", exc
            )


def _listed(task_ids: Any) -> list[str]:
    if task_ids is None:
        return []
    if isinstance(task_ids, str) or not isinstance(task_ids, Iterable):
        task_ids = [task_ids]
    return [found for found in map(str, task_ids) if found]

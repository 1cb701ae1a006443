"""Makes Celery's ``revoke`` also cancel waiting tasks.

``app.control.revoke``, ``AsyncResult.revoke``, ``celery control revoke`` and Flower's button all
call ``Control.broadcast``.
"""

from __future__ import annotations

from typing import Any

from amqp.exceptions import AMQPError
from celery.utils.log import get_logger
from kombu.exceptions import KombuError
from kombu.utils.functional import maybe_list

from ..errors import NativeDelayError, NoStore, UnsupportedBroker
from .delay import Delay
from .installation import installation_of

logger = get_logger(__name__)


class RevokesWaiting:
    """A mixin for the app's ``Control`` class: ``revoke`` also cancels waiting tasks."""

    app: Any

    def broadcast(self, command: str, *args: Any, **kwargs: Any) -> Any:
        """Cancel each revoked task that is waiting, then broadcast the command to the workers.

        The only exception: a ``revoke`` with *destination* or *pattern* cancels no waiting task.
        """
        # The arguments are handed on as they came: the user's class may take less by position.
        given = dict(zip(("arguments", "destination"), args, strict=False)) | kwargs
        everywhere = given.get("destination") is None and given.get("pattern") is None
        if command in ("revoke", "terminate") and everywhere:
            self._cancel_waiting((given.get("arguments") or {}).get("task_id"))
        return super().broadcast(command, *args, **kwargs)  # type: ignore[misc]

    def _cancel_waiting(self, task_ids: Any) -> None:
        ids = [str(each) for each in maybe_list(task_ids) or () if each]
        installation = installation_of(self.app)
        if not ids or installation is None or not installation.enabled:
            return
        try:
            Delay(self.app).cancel_all(ids)
        except (NoStore, UnsupportedBroker):
            return  # as Celery without this package
        except (NativeDelayError, KombuError, AMQPError, OSError) as exc:
            logger.warning(
                "native delay: revoked in workers only, waiting tasks are not cancelled: %s", exc
            )

"""A worker's end when its delayed tasks have been out of reach for too long.

Their store, or the broker that they are dispatched to: see ``native_delay_store_outage_seconds``.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from celery.utils.dispatch import Signal

from ..transports.interface import Outage

logger = logging.getLogger(__name__)

#: Connect a receiver to decide yourself; without one, the worker stops warmly with exit status 1,
#: so that its supervisor starts it again or calls for help. Receivers get the app as *sender*
#: and the *outage*: its *what*, *seconds* and *reason*. They are called in a thread of their own;
#: one that raises has decided nothing.
store_outage = Signal(name="native_delay_store_outage", providing_args={"outage"})


def react(app: Any, outage: Outage, stop: Callable[[], object]) -> None:
    """Tell of *outage*, and *stop* unless a receiver decides."""
    logger.critical("native delay: %s", outage)
    if not _decided(app, outage):
        logger.critical("native delay: stopping; connect to store_outage to do something else")
        stop()


def _decided(app: Any, outage: Outage) -> bool:
    try:
        answers = store_outage.send(sender=app, outage=outage)
    except SystemExit:  # such as Celery's WorkerShutdown, which would only end this thread
        return False
    return any(not isinstance(answer, Exception) for _, answer in answers)

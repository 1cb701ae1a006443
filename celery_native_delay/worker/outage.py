"""A worker stops if its store, or the broker it dispatches to, is unreachable for too long.

``native_delay_store_outage_seconds`` says how long.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from celery.utils.dispatch import Signal

from ..transports.interface import Outage

logger = logging.getLogger(__name__)

#: Signal of an outage. Without a receiver the worker stops warmly with exit status 1, so that its
#: supervisor starts it again or calls for help. A receiver gets the app as *sender* and the
#: *outage* (its *what*, *seconds* and *reason*), in a thread of its own, and keeps the worker
#: running unless it raises.
store_outage = Signal(name="native_delay_store_outage", providing_args={"outage"})


def react(app: Any, outage: Outage, stop: Callable[[], object]) -> None:
    """Log *outage* and call *stop*, unless a receiver of ``store_outage`` handles it."""
    logger.critical("native delay: %s", outage)
    if not _decided(app, outage):
        logger.critical("native delay: the worker stops; connect to store_outage to keep it")
        stop()


def _decided(app: Any, outage: Outage) -> bool:
    try:
        answers = store_outage.send(sender=app, outage=outage)
    except SystemExit:  # such as Celery's WorkerShutdown, which would only end this thread
        return False
    return any(not isinstance(answer, Exception) for _, answer in answers)

"""Announces tasks as revoked that were cancelled while they waited in the broker beside a store."""

from __future__ import annotations

from celery.utils.log import get_logger

from ..errors import described
from ..records.cancelled import was_cancelled
from ..records.interface import Records
from .arrival import Announce, Arrival, Ruling
from .in_time import in_time

logger = get_logger(__name__)


class Revoked:
    """A check before a task runs: announce a task that was cancelled while it waited in the broker.

    Nothing can remove the message from the broker, so the store keeps the id of the cancelled task.
    If the store is away, the task waits.
    """

    def __init__(self) -> None:
        self.state: Records | None = None
        """The state in the store; None if no task waits in the broker beside a store."""
        self._is_told = False

    def __call__(self, arrival: Arrival) -> Ruling | None:
        delayed, state = arrival.delayed, self.state
        if delayed is None or delayed.stored or state is None or not arrival.has_headers:
            return None
        try:
            is_revoked = in_time(lambda: was_cancelled(state, arrival.id))
        except Exception as exc:  # of any driver
            if not self._is_told:
                self._is_told = True
                logger.warning(
                    "native delay: tasks that waited in the broker wait until the store answers, "
                    "as it knows the cancelled ones: %s",
                    described(exc),
                )
            return arrival.until_store_answers(delayed.delivery_id)
        self._is_told = False
        return Announce() if is_revoked else None

"""Records in a Redis broker, beside the messages that wait: one script changes both."""

from __future__ import annotations

from ...records.redis import RedisRecords
from .store import Store


class BrokerRecords(RedisRecords):
    """Records beside the messages of one *store*.

    They raise redis-py's errors, BrokerFull and NotPermitted.
    """

    needs_connection = True
    has_marks = False

    def __init__(self, store: Store) -> None:
        self.keys = store.keys
        self._of_broker = store.keys.wake, store.keys.parked
        self._patient = store

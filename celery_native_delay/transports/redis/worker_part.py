"""Code for workers on Redis: move due messages, and retry undeliverable messages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ...finding import Finding
from ...keyed.records import keep_key
from ...now import time_ns
from ...redis_server import clocks
from ..interface import Rescue, Wait, WorkerPart
from .promoter import RedisPromoter
from .store import BATCH

#: How many scripts one rescue runs at most, so that a destination that always rejects costs little.
_ROUND = 100


class RedisWorkerPart(WorkerPart):
    def prepare(self, where: str) -> str:
        server = self._delays.prepare()
        census = self._delays.own.census()
        return (
            f"{where} ({server}) holds delayed tasks under {self._delays.keys.space}: "
            f"{census.waiting} waiting, {census.parked} parked; promoting in this worker; "
            f"{self.terms}"
        )

    def dangers(self) -> list[Finding]:
        """Find Redis settings that can lose messages, and a wrong clock of Redis or this worker."""
        return [*self._delays.dangers(), *clocks(self._delays.clock_ahead_seconds())]

    def put_one_back(self, wait: Wait) -> None:
        message = wait.on(wait.message._raw)
        destination = self._channel.destination(wait.queue, message)
        self._delays.put_back(message, destination, due_us=wait.due_us)
        now_us = time_ns() // 1000
        keep_key(self._delays.records, message["headers"], due_us=wait.due_us, now_us=now_us)

    def rescue(self) -> Rescue:
        return rescue(self._delays)

    def promoter(self, connect: Callable[..., Any]) -> RedisPromoter:
        return RedisPromoter(connect)


def rescue(delays: Any) -> Rescue:
    """Try again to deliver due but undeliverable messages; return the counts."""
    store, version = delays.own, delays.version
    outcome = Rescue()
    before_us = store.now_us()
    for _ in range(_ROUND):
        handed = store.rescue(version=version, before_us=before_us)
        outcome.delivered += handed.delivered
        outcome.still_parked += handed.parked
        if handed.taken < BATCH:
            break
    return outcome

"""A worker's questions about each message that waited, answered from memory, without I/O."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from time import monotonic, time_ns
from typing import Any

from ....errors import LedgerUnavailable
from ....message import Delayed
from ...interface import Answer
from ..ledger.entry import member_of
from ..topology import Topology
from .decisions import Decisions
from .follower import Follower
from .notes import Decision, Note

logger = logging.getLogger(__name__)

#: Seconds that a message waits for a follower that has fallen behind: its thread may not have had
#: its turn.
_FALLEN_BEHIND_SECONDS = 0.3


class StreamReceipts:
    """Receipts from a ledger in streams, answered from memory."""

    def __init__(self, client: Any, topology: Topology) -> None:
        """Begin when all decisions have been read, or none can be; *client* is not touched."""
        self._decisions = Decisions()
        self._follower = Follower(client, topology, topology.ledger.of_decisions, self)
        self._follower.start()
        started = monotonic()
        try:
            with self._follower.current():
                pass
        except LedgerUnavailable as exc:
            logger.warning("native delay: %s", exc)
            return
        seconds = monotonic() - started
        logger.info(
            "native delay: %d decisions of the ledger read in %.1f s", len(self._decisions), seconds
        )

    def restart(self) -> None:
        """Decisions that were read once stay."""

    def read(self, rank: int, note: Note, message: Any) -> None:
        if isinstance(note, Decision):
            self._decisions.add(note, rank=rank, now_ms=time_ns() // 1_000_000)

    def may_run(self, headers: Mapping[str, Any], delayed: Delayed) -> Answer:
        if member_of(headers, delayed.delivery_id) is None:
            return Answer.RUN
        answer = self._answer(delayed, is_fresh=self._follower.is_fresh)
        if answer is Answer.AWAY:
            # What was read while it waited counts.
            answer = self._answer(
                delayed, is_fresh=self._follower.wait_fresh(_FALLEN_BEHIND_SECONDS)
            )
        return answer

    def _answer(self, delayed: Delayed, *, is_fresh: bool) -> Answer:
        now_ms = time_ns() // 1_000_000
        return self._decisions.answer(delayed, now_ms=now_ms, is_fresh=is_fresh)

    def close(self) -> None:
        self._follower.stop()

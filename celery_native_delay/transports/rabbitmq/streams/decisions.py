"""Deliveries that count, by the decisions read so far. Pure: time is an argument."""

from __future__ import annotations

import logging
from typing import NamedTuple

from ....message import Delayed
from ...interface import Answer
from ..stream_names import DECISION_GRACE_SECONDS
from .notes import Decision

logger = logging.getLogger(__name__)

#: A copy whose decision has not come after so many ms never counts: its process is gone.
PENDING_MS = 30_000

#: Those that are to be forgotten are looked for at every so many decisions.
_FORGET_EVERY = 10_000


class _Replaced(NamedTuple):
    rank: int
    new: str
    last_due_ms: int


class Decisions:
    """By old delivery, the new one that takes its place.

    Of two decisions about one delivery the first counts: in the stream of the lower rank, or there
    the one that stands first. So all who read come to the same.
    """

    def __init__(self) -> None:
        self._replaced: dict[str, _Replaced] = {}
        self._until_forgetting = _FORGET_EVERY

    def __len__(self) -> int:
        return len(self._replaced)

    def add(self, decision: Decision, *, rank: int, now_ms: int) -> None:
        """Take in a decision from the stream of *rank*."""
        known = self._replaced.get(decision.old)
        if known is None or rank < known.rank:
            self._replaced[decision.old] = _Replaced(rank, decision.new, decision.last_due_ms)
        self._until_forgetting -= 1
        if self._until_forgetting <= 0:
            self.forget(now_ms)

    def forget(self, now_ms: int) -> None:
        """Drop what no message can ask for any more."""
        until_ms = now_ms - DECISION_GRACE_SECONDS * 1000
        self._replaced = {
            old: replaced
            for old, replaced in self._replaced.items()
            if replaced.last_due_ms > until_ms
        }
        self._until_forgetting = max(_FORGET_EVERY, len(self._replaced))

    def successor(self, delivery_id: str) -> str | None:
        """The delivery that has taken the place of this one, None if it counts."""
        replaced = self._replaced.get(delivery_id)
        return None if replaced is None else replaced.new

    def answer(self, delayed: Delayed, *, now_ms: int, is_fresh: bool) -> Answer:
        """The answer to a worker that asks if a message that waited may run.

        Without *is_fresh*, when decisions may not have been read yet, only what was decided counts,
        which no news can change.
        """
        if delayed.delivery_id in self._replaced:
            return Answer.DROP
        if delayed.replaces is not None:
            successor = self.successor(delayed.replaces.delivery_id)
            if successor is None and now_ms - delayed.replaces.made_ms < PENDING_MS:
                return Answer.NOT_YET
            if successor is None and is_fresh:
                logger.warning(
                    "native delay: a copy of delivery %s was never decided on, and is dropped: "
                    "the original is due when it was",
                    delayed.replaces.delivery_id,
                )
                return Answer.DROP
            if successor not in (None, delayed.delivery_id):
                return Answer.DROP
        return Answer.RUN if is_fresh else Answer.AWAY

"""Keys of messages that are moved: the record of a key goes with its message, in this order.

1. The message and the record are written in the other place, in one step.
2. The source's record lets go of the task.
3. The message is removed from the source.

A process that dies in between leaves the message in both places; the record in the other place
tells the next run that it is there.
"""

from __future__ import annotations

from functools import partial
from secrets import token_hex

from ..errors import CannotDelay
from ..keyed import rules
from ..keyed.publishing import AnotherStands, KeyedPublish
from ..keyed.record import HEADER, Mark, Record
from ..keyed.rules import Seen, Step
from ..records.waiting import PLACE
from ..transports.moving import Moving, MovingPart, Source

_UNKNOWN = "nothing is named that records the keys (native_delay_records, --records)"

#: The record that tells whether two places are one is kept for so long, should it not be removed.
_PROBE_US = 60_000_000


class MovingKeys:
    """Keys and places of the messages of *source*, which are moved *into* another place."""

    def __init__(self, source: Source, into: MovingPart) -> None:
        self._into = into
        self._is_kept = source.keeps_keys
        self._from = None if self._is_kept else source.key_records()
        self._to = None if self._is_kept else into.key_records()
        self._is_probed = False

    @property
    def warning(self) -> str | None:
        """The warning about tasks under keys, before any is moved; None if they go along."""
        if self._is_kept:
            return None
        if self._from is None:
            return f"tasks under a key stay, if there are any: {_UNKNOWN}"
        if self._to is None:
            return f"tasks under a key become ordinary ones: {self._into.name} keeps no keys"
        return None

    def take_in(self, moving: Moving) -> bool:
        """:meth:`MovingPart.take_in`, with what is recorded of the message's key.

        Raises:
            NativeDelayError: it cannot be taken in, or its key does not let it; it was not sent.
        """
        mark = Mark.of(moving.headers)
        if mark is not None and not self._is_kept and not self._is_probed:
            self._probe()
        if self._is_kept:
            return self._into.take_in(moving)
        # A place counts in its own line. The task comes when it is its turn, and stands anew.
        moving = moving.without(PLACE)
        if mark is None or moving.task_id is None:
            return self._into.take_in(moving)
        if self._from is None:
            raise CannotDelay(f"its task is under a key: {_UNKNOWN}")
        seen = self._from.read(mark.name)
        if rules.runs(seen):
            raise CannotDelay("a task runs under its key: run this again when that is over")
        if self._to is None:
            is_once = self._into.take_in(moving.without(HEADER))
        else:
            is_once = self._carry(moving, moving.task_id, mark, seen.record)
        self._from.change(mark.name, partial(rules.let_go, task_id=moving.task_id))
        return is_once

    def _carry(self, moving: Moving, task_id: str, mark: Mark, known: Record | None) -> bool:
        stands = known is not None and known.id == task_id
        if moving.delayed.cancelled or not (stands or moving.again):
            return self._into.take_in(moving)
        rule = partial(
            rules.carry, task_id=task_id, known=known or Record(), due_us=moving.delayed.due_us
        )
        try:
            return self._into.take_in(moving, KeyedPublish(mark.name, rule, task_id))
        except AnotherStands as exc:
            raise CannotDelay(
                "another task waits for its key there: cancel one of the two, and run this again"
            ) from exc

    def _probe(self) -> None:
        """Find out whether both places have the same records, however they are named."""
        if self._from is not None and self._to is not None:
            token = token_hex(16)
            name = f"probe:{token}"
            self._from.change(name, partial(_set, record=Record(id=token)))
            self._is_kept = self._to.read(name).record is not None
            self._from.change(name, partial(_set, record=None))
        self._is_probed = True


def _set(seen: Seen, *, record: Record | None) -> Step:
    return Step(record, seen.now_us + _PROBE_US)

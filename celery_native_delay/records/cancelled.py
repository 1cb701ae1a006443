"""The ids of tasks that were cancelled while they waited in the broker beside a store.

The store has no row of such a task, so it keeps the id until the message has come.
"""

from __future__ import annotations

from ..durations import DAY_US
from ..texts import storable
from .interface import Change, RecordName, Records, Snapshot

#: Microseconds that an id is kept after its message has come: the broker may deliver it again.
_KEPT_US = DAY_US


def note_cancelled(records: Records, task_id: str, *, kept_us: int) -> None:
    """Let workers announce the task as revoked if its message comes within *kept_us*."""
    records.change(_name(task_id), lambda seen: Change("1", seen.now_us + kept_us, None))


def was_cancelled(records: Records, task_id: str) -> bool:
    """Return True if the task was cancelled, whose message has come now."""
    name = _name(task_id)
    if records.read(name).text is None:
        return False

    def kept(seen: Snapshot) -> Change[None]:
        # A changed text, because only that is written.
        return Change(seen.text and "came", seen.now_us + _KEPT_US, None)

    records.change(name, kept)
    return True


def _name(task_id: str) -> RecordName:
    return RecordName("cancelled", storable(task_id))

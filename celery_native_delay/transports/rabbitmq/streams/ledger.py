"""A ledger of what waits in the levels, through the copies that RabbitMQ keeps of it.

A message in a level cannot be taken back. To move one, a copy with a new delivery id is sent that
names what it replaces; then a decision is noted. Until workers read the decision, the old one
counts and the copy does not: if a process dies in between, one of them runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from secrets import token_hex
from time import monotonic, time_ns
from typing import Any, TypeVar

import amqp

from ....durations import duration
from ....errors import LedgerUnavailable
from ....finding import Finding
from ....ledger.model import ALL, Ledger, Outcome, Page, Query, Verdict, Waiting
from ....message import Replaces
from ....settings import DelaySettings
from ...per_process import PerProcess
from ..ledger.entry import Entry
from ..ledger.ledger import due_then
from ..outbox import outbox_key
from ..stream_names import LedgerStreams
from ..topology import Topology
from .connection import stream_connection
from .follower import Follower
from .memory import Found, Memory, Place
from .notes import Decision, Mark, Note, Noted, Purge, note_of

T = TypeVar("T")

#: A message that is due sooner, in seconds, can neither be cancelled nor moved: workers might not
#: have read of it in time.
MARGIN_SECONDS = 2.0

#: A copy that is to come now comes so much later, in µs: after what was decided about it.
_HANDOVER_US = 500_000

#: A decision must follow its copy within so many seconds.
_DECIDE_SECONDS = 5.0

#: Seconds without a question after which nothing is followed any more.
_IDLE_SECONDS = 60.0


class Followed:
    """The streams as they were read and are followed, for all questions of this process."""

    def __init__(self, client: Any, topology: Topology) -> None:
        self.memory = Memory()
        #: How many entries of this process are known to have been read.
        self.recorded_seen = -1
        self.streams = topology.ledger.streams
        self.follower = Follower(client, topology, self.streams, self, idle_seconds=_IDLE_SECONDS)
        self.follower.start()

    def restart(self) -> None:
        self.memory = Memory()

    def read(self, rank: int, note: Note, message: Any) -> None:
        now_us = time_ns() // 1000
        match note:
            case Noted():
                offset = message.properties["application_headers"]["x-stream-offset"]
                self.memory.add(note, message.body, Place(rank, offset), now_us=now_us)
            case Decision():
                self.memory.decide(note, rank=rank, now_us=now_us)
            case Purge():
                self.memory.purge(rank)


class StreamLedger(Ledger):
    """On one connection; see :class:`~celery_native_delay.ledger.model.Ledger`."""

    def __init__(self, delays: Any) -> None:
        self._delays = delays
        # Those of the producer here: its connection's entries are to be seen at once.
        self._settings: DelaySettings = delays.settings
        self._streams: LedgerStreams = delays.topology.ledger
        self._connection = stream_connection(delays.connection.client, self._settings)

    def count(self, query: Query = ALL) -> int:
        return self._ask(lambda memory, now_us: memory.count(query, now_us=now_us))

    def page(self, query: Query = ALL, *, offset: int = 0, limit: int = 50) -> Page:
        return self._ask(
            lambda memory, now_us: memory.page(query, offset=offset, limit=limit, now_us=now_us)
        )

    def get(self, task_id: str) -> list[Waiting]:
        return [found.task for found in self._find(task_id)]

    def counts(self, edges_us: Sequence[int]) -> list[int]:
        return self._ask(lambda memory, now_us: memory.counts(edges_us, now_us=now_us))

    def span(self) -> tuple[int, int] | None:
        return self._ask(lambda memory, now_us: memory.span(now_us=now_us))

    def findings(self) -> list[Finding]:
        """None, if it answers; else LedgerUnavailable."""
        self.count()
        return []

    def close(self) -> None:
        """Nothing is its own: the process goes on following for a while."""

    def purge(self) -> None:
        """Forget everything that waits; the caller empties the levels."""
        self._connection.write([(stream, Purge()) for stream in self._streams.of_entries])
        self._connection.recorded += 1

    # --- changing ------------------------------------------------------------------------

    def _change(self, task_id: str, due_us: int | None, *, cancelled: bool) -> Outcome:
        found = self._find(task_id)
        tasks = tuple(each.task for each in found)
        if not found:
            return Outcome(task_id, Verdict.UNKNOWN)
        late = ""
        is_due_us: int | None = None
        for each in found:
            new_due_us = time_ns() // 1000 + _HANDOVER_US if due_us is None else due_us
            late_now = self._replace(each, new_due_us, cancelled=cancelled)
            late = late or late_now
            if not late_now:
                is_due_us = new_due_us
        if is_due_us is None:
            return Outcome(task_id, Verdict.TOO_LATE, None, tasks, late)
        return Outcome(task_id, Verdict.DONE, None if cancelled else is_due_us, tasks)

    def _replace(self, found: Found, due_us: int, *, cancelled: bool) -> str:
        """Send a copy and note that it counts; why it is too late for that, or ""."""
        task = found.task
        if late := _too_late(task):
            return late
        entry = self._fetch(found.place, task.delivery_id)
        made_ms = time_ns() // 1_000_000
        begun = monotonic()
        moved = due_then(entry, due_us)
        new_id = token_hex(16)
        wait = moved.wait(new_id, due_us, cancelled=cancelled)
        self._delays.put_back(
            amqp.Message(moved.body, **moved.properties),
            wait._replace(replaces=Replaces(task.delivery_id, made_ms)),
            recorded=not cancelled,
        )
        if late := _too_late(task):
            return late
        if monotonic() - begun > _DECIDE_SECONDS:
            return "the broker is too slow"
        decision = Decision(task.delivery_id, new_id, task.due_us // 1000, due_us // 1000)
        stream = self._streams.for_decision((decision.last_due_ms - made_ms) / 1000)
        self._connection.write([(stream, decision)])
        followed = self._followed()

        def winner() -> str | None:
            return followed.memory.decisions.successor(task.delivery_id)

        followed.follower.wait_until(lambda: winner() is not None)
        return "" if winner() == new_id else "another change came first"

    def _fetch(self, place: Place, delivery_id: str) -> Entry:
        """A message as it was published, from where it stands."""
        stream = self._streams.streams[place.rank]
        message = self._connection.fetch(stream, place.offset)
        note = note_of(message.properties["application_headers"])
        if not isinstance(note, Noted) or note.delivery_id != delivery_id:
            raise LedgerUnavailable(
                f"expected delivery {delivery_id} at offset {place.offset} of {stream.name}, got "
                f"{note}: it is no longer kept"
            )
        return Entry.decoded(message.body)

    # --- asking --------------------------------------------------------------------------

    def _find(self, task_id: str) -> list[Found]:
        return self._ask(lambda memory, now_us: memory.find(task_id, now_us=now_us))

    def _ask(self, question: Callable[[Memory, int], T]) -> T:
        followed = self._up_to_date()
        # Which may have been lost meanwhile, to be read anew.
        with followed.follower.current():
            return question(followed.memory, time_ns() // 1000)

    def _up_to_date(self) -> Followed:
        """All that this process has published was read; what others have, milliseconds later."""
        followed = self._followed()
        with followed.follower.current():
            pass
        recorded = self._connection.recorded
        if followed.recorded_seen != recorded:
            self._connection.flush(None)
            token = token_hex(8)
            followed.follower.expect(token)
            self._connection.write([(stream, Mark(token)) for stream in self._streams.streams])
            followed.follower.wait_for_mark(token)
            followed.recorded_seen = recorded
        return followed

    def _followed(self) -> Followed:
        client = self._delays.connection.client
        key = outbox_key(client, self._settings)
        return _followed.get(
            key,
            lambda: Followed(client, self._delays.topology),
            is_good=lambda followed: followed.follower.is_asked(),
        )


def _too_late(task: Waiting) -> str:
    seconds = (task.due_us - time_ns() // 1000) / 1_000_000
    if seconds >= MARGIN_SECONDS:
        return ""
    if seconds <= 0:
        return "it was handed over meanwhile"
    return (
        f"it is due in {duration(seconds)}, and a ledger in streams takes changes until "
        f"{duration(MARGIN_SECONDS)} before"
    )


# ---- what this process follows ---------------------------------------------------------------

_followed: PerProcess[Any, Followed] = PerProcess()

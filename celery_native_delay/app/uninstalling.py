"""Hands waiting tasks back to plain Celery, and removes this package from the broker."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing, suppress
from typing import Any

from ..errors import NoRecords, SettingsError
from ..records.opened import records_at
from ..schedules.state import occurrence_of
from ..settings import DRAIN, DelaySettings
from ..transports.interface import AdminPart
from ..transports.moving import Found, Moving, MovingPart, Source, Stays, Void
from .installation import delaying_channel
from .schedules import Schedules

_WAITS = Stays("it waits: use --move-to-eta, or wait until it is due")


class Leaving(Source):
    """Waiting tasks of a draining app: as plain ETA tasks, or refused if *moves* is False."""

    #: A plain task has no key.
    keeps_keys = True

    def __init__(self, source: Source, *, moves: bool) -> None:
        self._source = source
        self._moves = moves
        self.name = source.name

    def count(self) -> int:
        return self._source.count()

    def found(self) -> Iterator[Found]:
        """Yield the tasks; cancelled tasks and occurrences of schedule entries are void."""
        for found in self._source.found():
            match found:
                case Moving(delayed=delayed) if delayed.cancelled:
                    yield Void()
                case Moving() if occurrence_of(found.headers) is not None:
                    yield Void()  # celery beat sends it
                case Moving() if not self._moves:
                    yield _WAITS
                case _:
                    yield found

    def done(self) -> bool:
        return self._source.done()

    def close(self) -> None:
        self._source.close()


def leaving(
    app: Any, connection: Any, *, moves: bool
) -> tuple[MovingPart | None, Sequence[Source]]:
    """Remove the schedule entries; return what moves the waiting tasks, and the waiting tasks.

    The result is (None, ()) if messages of this broker cannot be moved: SQS and pgmq.

    Raises:
        SettingsError: the app does not drain, so that new tasks would wait.
    """
    channel, settings = delaying_channel(app, connection)
    if not settings.drains:
        raise SettingsError(
            f'expected native_delay_enabled = "{DRAIN}", got {settings.enabled!r}: set it in '
            f"workers and producers, and deploy them, so that no new task waits"
        )
    with suppress(NoRecords):
        Schedules(app).remove_all()
    if not hasattr(channel, "moving_part"):
        return None, ()
    part: MovingPart = channel.moving_part(settings)
    return part, [Leaving(source, moves=moves) for source in part.own_sources()]


def uninstall(part: AdminPart, settings: DelaySettings) -> list[str]:
    """Delete what this package keeps on the broker and in the records; return texts of it."""
    removed = part.uninstall()
    if settings.records is not None:
        with closing(records_at(settings.records, settings.namespace)) as records:
            records.clear()  # of Spark runs
            removed.append(f"the records of {settings.namespace} at {records.where}")
    return removed

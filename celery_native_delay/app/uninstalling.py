"""Hands waiting tasks back to plain Celery, for ``delay uninstall``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

from ..errors import NoStore, SettingsError, UnsupportedBroker
from ..records.cancelled import was_cancelled
from ..records.interface import Records
from ..schedules.state import occurrence_of
from ..settings import DRAIN
from ..transports.moving import Found, Moving, MovingPart, Source, Stays, Void
from ..transports.virtual.moving import StoreSource
from .installation import delaying_channel
from .schedules import Schedules

_WAITS = Stays("it waits: use --move-to-eta, or wait until it is due")


class Leaving(Source):
    """Waiting tasks of a draining app: as plain ETA tasks, or refused if *moves* is False."""

    #: A plain task has no key.
    keeps_keys = True

    def __init__(self, source: Source, state: Records | None, *, moves: bool) -> None:
        self._source = source
        self._state = state
        self._moves = moves
        self.name = source.name

    def count(self) -> int:
        return self._source.count()

    def found(self) -> Iterator[Found]:
        """Yield the tasks; cancelled tasks and occurrences of schedule entries are void."""
        for found in self._source.found():
            match found:
                case Moving() if self._is_cancelled(found):
                    yield Void()
                case Moving() if occurrence_of(found.headers) is not None:
                    yield Void()  # celery beat sends it
                case Moving() if not self._moves:
                    yield _WAITS
                case _:
                    yield found

    def _is_cancelled(self, moving: Moving) -> bool:
        if moving.delayed.cancelled or self._state is None or moving.task_id is None:
            return moving.delayed.cancelled
        return was_cancelled(self._state, moving.task_id)

    def done(self) -> bool:
        return self._source.done()

    def close(self) -> None:
        self._source.close()


def leaving(
    app: Any, connection: Any, *, moves: bool
) -> tuple[MovingPart | None, Sequence[Source]]:
    """Remove the schedule entries; return what moves the waiting tasks, and the waiting tasks.

    The result is (None, ()) if messages of this broker cannot be moved: SQS and pgmq without a
    store.

    Raises:
        SettingsError: the app does not drain, so that new tasks would wait.
    """
    channel, settings = delaying_channel(app, connection)
    if not settings.drains:
        raise SettingsError(
            f'expected native_delay_enabled = "{DRAIN}", got {settings.enabled!r}: set it in '
            f"workers and producers, and deploy them, so that no new task waits"
        )
    with suppress(NoStore):
        Schedules(app).remove_all()
    if not hasattr(channel, "moving_part"):
        return None, ()
    part: MovingPart = channel.moving_part(settings)
    sources: list[Source] = [] if channel.store is None else [StoreSource(channel.store)]
    with suppress(UnsupportedBroker):
        sources += part.own_sources()
    state = channel.state_of_revoked()
    found = [Leaving(source, state, moves=moves) for source in sources]
    return (part, found) if found else (None, ())

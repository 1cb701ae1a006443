"""Flower's list of tasks, kept in step with the records from its start on.

A full run of Python's garbage collector over a hundred thousand tasks and their index stops the IO
loop for a quarter of a second, and it runs again and again while they come. They need none of it:
tasks lead nowhere back. So :func:`set_aside` takes them out of its sight. This is the process of
Flower, which only we tune: install() has replaced its application.
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator, Iterable
from time import monotonic
from typing import Any

from celery.utils.log import get_logger

from ..errors import NativeDelayError, NoRecords
from .asking import Asking
from .state import WaitingState

logger = get_logger(__name__)

#: Tasks at a time: applied to Flower's state within milliseconds, on its IO loop.
_CHUNK = 200

_PAUSE_SECONDS = 5.0

#: After so many that came or changed between two rounds they are set aside, within milliseconds.
_SET_ASIDE = 1000

#: A round may take this part of the time.
_SHARE = 0.05


def set_aside() -> None:
    """Let the garbage collector pass over all that is here now, after one last look.

    What is no garbage now, and later becomes part of a cycle, is not freed any more: so this is
    done at the start, and while many tasks come, change or go at once.
    """
    gc.collect()
    gc.freeze()


class Refreshing:
    """A reader of what waits, round after round, earliest first, up to half of ``--max_tasks``."""

    def __init__(self, asking: Asking, events: Any) -> None:
        self._asking = asking
        self._events = events
        self._ends = False
        self._told = ""
        self._missed: set[str] = set()
        self._indexed = 0

    @property
    def _state(self) -> WaitingState:
        state: WaitingState = self._events.state
        return state

    async def run(self) -> None:
        """Read round after round, until :meth:`stop`."""
        while not self._ends:
            started = monotonic()
            try:
                await self._round()
                self._told = ""
            except NoRecords:
                async for some in _in_turns(self._state.delayed):
                    self._do_not_wait(self._state.due(some))
            except NativeDelayError as exc:
                if not self._told:
                    logger.warning("native delay: the list of tasks may be stale: %s", exc)
                self._told = str(exc)
            except Exception:
                logger.exception("native delay: the list of tasks may be stale")
            await asyncio.sleep(max(_PAUSE_SECONDS, (monotonic() - started) / _SHARE))

    def stop(self) -> None:
        """End the rounds; from any thread."""
        self._ends = True

    def indexed(self, count: int) -> None:
        """Count tasks that have come, changed or gone, which Flower has indexed anew."""
        self._indexed += count
        if self._indexed >= _SET_ASIDE:
            self._indexed = 0
            set_aside()

    async def _round(self) -> None:
        before = list(self._state.delayed)
        seen: set[str] = set()
        offset, total, self._indexed = 0, 1, 0
        most = self._state.tasks.limit // 2
        while offset < min(total, most) and not self._ends:
            page = await self._page(offset)
            self.indexed(self._state.saw(page.tasks))
            seen.update(task.id for task in page.tasks)
            total = page.total or 0
            offset += _CHUNK
        if total > most:
            return  # of the others nothing is known
        # What becomes due meanwhile moves the others up, past the reader: missed once is not gone.
        missed, self._missed = self._missed, set()
        async for some in _in_turns(before):
            missing = set(some) - seen
            self._do_not_wait(self._state.due(missing) | (missing & missed))
            self._missed |= missing & self._state.delayed.keys()

    def _do_not_wait(self, ids: set[str]) -> None:
        self._state.does_not_wait(ids)
        self.indexed(len(ids))

    async def _page(self, offset: int) -> Any:
        return await self._asking.delay(lambda delay: delay.ls(limit=_CHUNK, offset=offset))


async def _in_turns(ids: Iterable[str]) -> AsyncIterator[list[str]]:
    """Chunks of *ids*, with a turn of the IO loop between them."""
    known = list(ids)
    for start in range(0, len(known), _CHUNK):
        yield known[start : start + _CHUNK]
        await asyncio.sleep(0)

"""Keeps Flower's list of tasks in step with the ledger, from its start on."""

from __future__ import annotations

import asyncio
from time import monotonic
from typing import Any

from celery.utils.log import get_logger

from ..core.errors import NativeDelayError, NoLedger
from .asking import Asking
from .state import WaitingState

logger = get_logger(__name__)

#: Tasks at a time: applied to Flower's state within milliseconds, on its IO loop.
_CHUNK = 200

_PAUSE_SECONDS = 5.0

#: A round may take this part of the time.
_SHARE = 0.05


class Refreshing:
    """Reads what waits, round after round, earliest first, up to half of ``--max_tasks``."""

    def __init__(self, asking: Asking, events: Any) -> None:
        self._asking = asking
        self._events = events
        self._ends = False
        self._told = ""
        self._missed: set[str] = set()

    @property
    def _state(self) -> WaitingState:
        state: WaitingState = self._events.state
        return state

    async def run(self) -> None:
        """Until :meth:`stop`."""
        while not self._ends:
            started = monotonic()
            try:
                await self._round()
                self._told = ""
            except NoLedger:
                self._state.does_not_wait(self._state.due())
            except NativeDelayError as exc:
                if not self._told:
                    logger.warning("native delay: the list of tasks may be stale: %s", exc)
                self._told = str(exc)
            except Exception:
                logger.exception("native delay: the list of tasks may be stale")
            await asyncio.sleep(max(_PAUSE_SECONDS, (monotonic() - started) / _SHARE))

    def stop(self) -> None:
        """From any thread."""
        self._ends = True

    async def _round(self) -> None:
        before = set(self._state.delayed)
        seen: set[str] = set()
        offset, total = 0, 1
        most = self._state.tasks.limit // 2
        while offset < min(total, most) and not self._ends:
            page = await self._page(offset)
            self._state.saw(page.tasks)
            seen.update(task.id for task in page.tasks)
            total = page.total or 0
            offset += _CHUNK
        if total > most:
            return  # nobody knows of the others
        # What becomes due meanwhile moves the others up, past the reader: missed once is not gone.
        missing = before - seen
        self._state.does_not_wait(missing & (self._state.due() | self._missed))
        self._missed = missing & self._state.delayed.keys()

    async def _page(self, offset: int) -> Any:
        return await self._asking.delay(lambda delay: delay.ls(limit=_CHUNK, offset=offset))

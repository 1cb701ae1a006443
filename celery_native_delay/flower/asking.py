"""Questions to broker and records, in threads of our own and bounded in time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from typing import TypeVar

from celery import Celery
from kombu.exceptions import OperationalError

from ..app.delay import Delay
from ..app.installation import admin_part, installed
from ..durations import duration
from ..errors import RecordsUnavailable
from ..transports.interface import AdminPart
from ..urls import without_password

T = TypeVar("T")

#: Questions at a time. One that hangs is not Flower's: its own executor has few as well.
_THREADS = 4

#: An answer takes milliseconds, or something is wrong.
ANSWER_SECONDS = 10.0


class Asking:
    """Questions about one app, asked from Flower's IO loop."""

    def __init__(self, app: Celery) -> None:
        self.app = app
        # Records that hang do not keep the broker from being asked.
        self._broker = ThreadPoolExecutor(_THREADS, thread_name_prefix="native-delay")
        self._records = ThreadPoolExecutor(_THREADS, thread_name_prefix="native-delay-records")

    async def delay(
        self, question: Callable[[Delay], T], *, within_seconds: float = ANSWER_SECONDS
    ) -> T:
        """The answer to *question*, which blocks.

        Raises:
            RecordsUnavailable: it is away, or so is the broker, or it took longer.
            NativeDelayError: as *question* does.
        """
        return await self._ask(self._records, lambda: question(Delay(self.app)), within_seconds)

    async def admin(
        self, question: Callable[[AdminPart], T], *, within_seconds: float = ANSWER_SECONDS
    ) -> T:
        """The answer to *question* about the broker, as ``celery delay`` asks it.

        Raises:
            RecordsUnavailable: the broker is away, or slow.
            SettingsError, UnsupportedBroker: see :func:`admin_part`.
        """
        return await self._ask(
            self._broker, lambda: self._with_admin_part(question), within_seconds
        )

    def stop(self) -> None:
        """Drop the questions that no thread has begun with."""
        for executor in (self._broker, self._records):
            executor.shutdown(wait=False, cancel_futures=True)

    # --- private -------------------------------------------------------------------------

    async def _ask(
        self, executor: ThreadPoolExecutor, question: Callable[[], T], within_seconds: float
    ) -> T:
        asked = asyncio.get_running_loop().run_in_executor(executor, question)
        try:
            return await asyncio.wait_for(asked, within_seconds)
        except TimeoutError as exc:
            raise RecordsUnavailable(
                f"{self._where(executor)} gave no answer within {duration(within_seconds)}; "
                f"what was asked may yet be done"
            ) from exc
        except self._broker_errors as exc:
            raise RecordsUnavailable(f"{self._where(self._broker)} cannot be used: {exc}") from exc

    def _where(self, executor: ThreadPoolExecutor) -> str:
        """The server that this executor asks, in words without passwords."""
        url = installed(self.app).settings().records if executor is self._records else None
        if url is not None:
            return f"the records at {without_password(url)}"
        return f"the broker at {self.app.connection_for_write().as_uri()}"

    def _with_admin_part(self, question: Callable[[AdminPart], T]) -> T:
        with self.app.connection_or_acquire() as connection:
            connection.ensure_connection(max_retries=1)
            return question(admin_part(self.app, connection))

    @cached_property
    def _broker_errors(self) -> tuple[type[Exception], ...]:
        connection = self.app.connection_for_write()
        return (
            OperationalError,
            OSError,
            *connection.connection_errors,
            *connection.channel_errors,
        )

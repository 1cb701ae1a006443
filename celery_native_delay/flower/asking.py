"""Calls the broker in threads, so that calls do not block Flower's event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property, partial
from typing import Any, TypeVar

from celery import Celery
from kombu.exceptions import OperationalError

from ..app.broker import ask_on_a_connection
from ..app.delay import Delay
from ..app.installation import admin_part, installed
from ..durations import duration
from ..errors import StoreUnavailable
from ..transports.interface import AdminPart
from ..urls import without_password

T = TypeVar("T")

#: The number of threads. Flower's own executor has few threads, and a blocked call would take one.
_THREADS = 8

#: An answer takes milliseconds. After this many seconds the server counts as unreachable.
ANSWER_SECONDS = 10.0


class Asking:
    """Makes blocking calls in threads. Raises StoreUnavailable for broker errors and timeouts."""

    def __init__(self, app: Celery) -> None:
        self.app = app
        self._executor = ThreadPoolExecutor(_THREADS, thread_name_prefix="native-delay")

    async def delay(
        self, question: Callable[[Delay], T], *, within_seconds: float = ANSWER_SECONDS
    ) -> T:
        """Call the function *question* with ``Delay(app)`` in a thread, and return the result."""
        return await self._ask(lambda: question(Delay(self.app)), self._records, within_seconds)

    async def admin(
        self, question: Callable[[AdminPart], T], *, within_seconds: float = ANSWER_SECONDS
    ) -> T:
        """Call the function *question* with the broker's :class:`AdminPart` in a thread."""

        def asked(connection: Any) -> T:
            return question(admin_part(self.app, connection))

        ask = partial(ask_on_a_connection, self.app, asked)
        return await self._ask(ask, self._broker, within_seconds)

    def stop(self) -> None:
        """Cancel all calls that have not started."""
        self._executor.shutdown(wait=False, cancel_futures=True)

    async def _ask(
        self, question: Callable[[], T], where: Callable[[], str], within_seconds: float
    ) -> T:
        asked = asyncio.get_running_loop().run_in_executor(self._executor, question)
        try:
            return await asyncio.wait_for(asked, within_seconds)
        except TimeoutError as exc:
            raise StoreUnavailable(
                f"{where()} gave no answer within {duration(within_seconds)}; "
                f"what was asked may yet be done"
            ) from exc
        except self._broker_errors as exc:
            raise StoreUnavailable(f"{self._broker()} cannot be used: {exc}") from exc

    def _broker(self) -> str:
        return f"the broker at {self.app.connection_for_write().as_uri()}"

    def _records(self) -> str:
        url = installed(self.app).settings().store
        return self._broker() if url is None else f"the store at {without_password(url)}"

    @cached_property
    def _broker_errors(self) -> tuple[type[Exception], ...]:
        connection = self.app.connection_for_write()
        errors = (*connection.connection_errors, *connection.channel_errors)
        return (OperationalError, OSError, *errors)

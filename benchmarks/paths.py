"""Show which functions and files of this package run for one delayed task.

``python -m benchmarks.paths`` prints a table. The first publish also declares the delay levels
(queues with a TTL). Receiving a task includes the worker's checks before the task runs.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from inspect import CO_OPTIMIZED
from pathlib import Path
from threading import Event, get_ident
from types import CodeType, FrameType
from typing import Any

from celery import Celery
from celery.contrib.testing.worker import start_worker

import celery_native_delay
from celery_native_delay import install
from celery_native_delay.testing import private_rabbitmq

PACKAGE = Path(celery_native_delay.__file__).parent

Seen = dict[CodeType, None]


class Trace:
    """Records the functions of this package that threads enter while :meth:`recording`."""

    def __init__(self) -> None:
        self._by_thread: dict[int, Seen] = {}
        self._records = False

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if self._records and event == "call" and code.co_filename.startswith(f"{PACKAGE}/"):
            self._by_thread.setdefault(get_ident(), {})[code] = None

    @contextmanager
    def recording(self) -> Iterator[None]:
        self._by_thread = {}
        self._records = True
        try:
            yield
        finally:
            self._records = False

    def of(self, thread: int) -> Seen:
        """Return the functions that *thread* entered, in order, without comprehensions."""
        return {
            code: None
            for code in self._by_thread.get(thread, {})
            if code.co_flags & CO_OPTIMIZED  # no module, no class
            and not code.co_name.endswith(("comp>", "expr>"))
        }


def measure(url: str) -> dict[str, Seen]:
    """Return the functions of each path, measured on an unused broker at *url*."""
    app = install(Celery("paths", broker=url, set_as_current=False))
    ran, ran_in = Event(), [0]

    @app.task(name="paths.run")
    def run() -> None:
        ran_in[0] = get_ident()
        ran.set()

    trace = Trace()
    found: dict[str, Seen] = {}
    sys.setprofile(trace)
    with trace.recording():
        run.apply_async(countdown=60)
    found["first publish"] = trace.of(get_ident())
    for _ in range(3):
        run.apply_async(countdown=60)
    with trace.recording():
        run.apply_async(countdown=60)
    found["steady publish"] = trace.of(get_ident())
    sys.setprofile(None)
    threading.setprofile(trace)
    with start_worker(app, pool="solo", perform_ping_check=False, loglevel="ERROR"):
        for _ in range(3):
            ran.clear()
            run.apply_async(countdown=1)
            with trace.recording():
                assert ran.wait(30)
    threading.setprofile(None)  # type: ignore[arg-type]
    found["receive"] = trace.of(ran_in[0])
    return found


def main() -> None:
    """Print a table, and with ``-v`` also each function in order of its first call."""
    with private_rabbitmq() as broker:
        found = measure(broker.url)
    print(f"{'path':<16} functions  files")
    for path, seen in found.items():
        files = {code.co_filename for code in seen}
        print(f"{path:<16} {len(seen):9}  {len(files):5}")
    if "-v" in sys.argv:
        for path, seen in found.items():
            print(f"\n{path}")
            for code in seen:
                where = Path(code.co_filename).relative_to(PACKAGE)
                print(f"  {where}:{code.co_firstlineno} {code.co_qualname}")


if __name__ == "__main__":
    main()

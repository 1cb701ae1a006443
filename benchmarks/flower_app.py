"""Run Flower with an extra page that reports the lateness of Flower's IO loop: ``URL``.

The first printed line is Flower's address. ``GET /late`` returns how many milliseconds late each
iteration of the IO loop was since the last such request.
"""

from __future__ import annotations

import asyncio
import sys
from time import perf_counter

from flower.options import default_options
from flower.urls import settings
from flower.views import BaseHandler

from benchmarks.apps import make_app
from celery_native_delay.flower import install
from celery_native_delay.flower.app import DelayFlower

EVERY_SECONDS = 0.001

late_ms: list[float] = []


class Late(BaseHandler):
    def get(self) -> None:
        self.write({"late_ms": late_ms})
        late_ms.clear()


async def watch() -> None:
    while True:
        began = perf_counter()
        await asyncio.sleep(EVERY_SECONDS)
        late_ms.append((perf_counter() - began - EVERY_SECONDS) * 1e3)


def main(url: str) -> None:
    install()
    options = {"enable_events": False, "port": 0}
    for name, value in (options | {"address": "127.0.0.1", "tasks_columns": "name"}).items():
        setattr(default_options, name, value)
    app = DelayFlower(options=default_options, capp=make_app("ours", url), **settings)
    app.add_handlers(".*", [("/late", Late)])
    print(f"http://127.0.0.1:{app.start_http_server()}", flush=True)
    app.io_loop.add_callback(watch)
    app.start()


if __name__ == "__main__":
    main(*sys.argv[1:])

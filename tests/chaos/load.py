"""A producer that may be killed: it writes a note before and after each step.

tests/chaos/run.py starts it as a process.
"""

from __future__ import annotations

import heapq
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random
from time import sleep, time
from typing import Any
from uuid import UUID

#: Acknowledged late, so tasks of a killed worker are delivered again.
TASK = "careful"

#: Also acknowledged late, but a success of it is not repeated.
ONCE_TASK = "careful_once"

#: Each queue by the way that leads there: its name, or an exchange and a routing key.
ROUTES: dict[str, dict[str, str]] = {
    "default": {"queue": "default"},
    "side": {"queue": "side"},
    "invoices": {"exchange": "billing", "routing_key": "invoice.new"},
}

BULK_SHARE, BULK_SIZES = 0.05, (2, 20)
CANCEL_SHARE = 0.15
ONCE_SHARE = 0.5
SHORTEST_SECONDS = 0.3


@dataclass(frozen=True)
class Wish:
    """A task to send, and perhaps to cancel."""

    id: str
    countdown: float
    cancel_after: float | None
    """Seconds from sending to the cancel: long before the due time, or about then."""


@dataclass(frozen=True)
class Step:
    """One or several tasks that a producer sends to one queue; several with bulk()."""

    pause_seconds: float
    queue: str
    wishes: tuple[Wish, ...]
    once: bool = False
    """True if the tasks may run once only."""


def steps(seed: int, *, rate: float, longest_seconds: float, once: bool = False) -> Iterator[Step]:
    """The endless steps of a producer:

    *rate* tasks per second with delays up to *longest_seconds*; if *once*, half of them are once.
    """
    chance = Random(seed)
    smallest, largest = BULK_SIZES
    mean_size = 1 + BULK_SHARE * ((smallest + largest) / 2 - 1)

    def wish() -> Wish:
        countdown = chance.triangular(SHORTEST_SECONDS, longest_seconds, SHORTEST_SECONDS)
        cancelled = chance.random() < CANCEL_SHARE
        cancel_after = chance.uniform(0.1, countdown + 0.1) if cancelled else None
        return Wish(str(UUID(int=chance.getrandbits(128), version=4)), countdown, cancel_after)

    while True:
        size = chance.randint(smallest, largest) if chance.random() < BULK_SHARE else 1
        yield Step(
            pause_seconds=chance.expovariate(rate / mean_size),
            queue=chance.choice(list(ROUTES)),
            wishes=tuple(wish() for _ in range(size)),
            once=once and chance.random() < ONCE_SHARE,
        )


class Notebook:
    """A file with one line per note; a killed writer never leaves half a line."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)

    def note(self, what: str, task_id: str, **more: Any) -> None:
        line = {"what": what, "id": task_id, "at": time()} | more
        os.write(self._file, json.dumps(line).encode() + b"\n")


class Producer:
    """Takes the steps of a seed at their times."""

    def __init__(self, app: Any, notebook: Notebook, cancel: Callable[[str], Any]) -> None:
        self._app = app
        self._cancel = cancel
        self._notes = notebook
        self._cancels: list[tuple[float, str]] = []

    def run(self, plan: Iterator[Step], *, until: float) -> None:
        """Send and cancel tasks until the Unix time *until*; skip later cancels."""
        next_at = time()
        while next_at < until:
            step = next(plan)
            # Do not catch up on the steps that an outage prevented.
            next_at = max(next_at + step.pause_seconds, time() - 1)
            self._cancel_what_is_due(next_at)
            self._send(step)
        self._cancel_what_is_due(until)

    def _send(self, step: Step) -> None:
        route = ROUTES[step.queue]
        task = ONCE_TASK if step.once else TASK
        for wish in step.wishes:
            due = time() + wish.countdown
            self._notes.note("sending", wish.id, queue=step.queue, due=due, once=step.once)
        try:
            if len(step.wishes) == 1:
                (wish,) = step.wishes
                self._app.tasks[task].apply_async(
                    task_id=wish.id, countdown=wish.countdown, **route
                )
            else:
                from celery_native_delay.bulk import bulk

                with bulk(self._app, timeout_seconds=30) as batch:
                    for wish in step.wishes:
                        batch.send(task, task_id=wish.id, countdown=wish.countdown, **route)
        except Exception as exc:
            for wish in step.wishes:
                self._notes.note("failed", wish.id, error=f"{type(exc).__name__}: {exc}"[:200])
            return
        for wish in step.wishes:
            self._notes.note("confirmed", wish.id)
            if wish.cancel_after is not None:
                heapq.heappush(self._cancels, (time() + wish.cancel_after, wish.id))

    def _cancel_what_is_due(self, until: float) -> None:
        """Cancel tasks in order of time; returns at *until*."""
        while self._cancels and self._cancels[0][0] <= until:
            at, task_id = heapq.heappop(self._cancels)
            sleep(max(at - time(), 0))
            self._notes.note("cancelling", task_id)
            try:
                outcome = self._cancel(task_id)
            except Exception as exc:  # done or not: its fate stays unknown
                sys.stderr.write(f"cancel of {task_id}: {type(exc).__name__}: {exc}\n")
                continue
            if outcome:
                self._notes.note("cancelled", task_id)
            else:
                self._notes.note("not cancelled", task_id, said=outcome.verdict.value)
        sleep(max(until - time(), 0))


def main(seed: str, rate: str, longest: str, until: str, notes: str, once: str) -> None:
    """Send tasks to the app of this process's environment until the given Unix time."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    plan = steps(int(seed), rate=float(rate), longest_seconds=float(longest), once=once == "True")
    from celery_native_delay import Delay
    from tests.acceptance.apps.installed import app

    Producer(app, Notebook(Path(notes)), Delay(app).cancel).run(plan, until=float(until))


if __name__ == "__main__":
    main(*sys.argv[1:])

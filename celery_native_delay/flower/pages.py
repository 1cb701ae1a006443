"""Tornado request handlers for the pages that this package adds to Flower."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Iterable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from time import monotonic, time
from typing import Any

from flower.views import BaseHandler
from tornado import web

from ..app.delay import Delay, listed
from ..app.runs import Run, RunStatus, runs_of
from ..errors import InvalidQuery, NativeDelayError, NoStore, StoreUnavailable
from ..finding import WRONG, Finding
from ..records.waiting import HELD_FROM_US, Query
from ..transports.interface import AdminPart
from .asking import Asking

STATIC = str(Path(__file__).parent / "static")

_BARS = 40

#: The largest number of parked messages (due, but without a queue) on the page.
_PARKED = 50

#: The largest number of lines (waiting tasks with the same rate limit and key) on the page Rates.
#: The browser sorts and searches the lines.
MOST_LINES = 500

#: The largest number of runs on the page Runs, and the seconds to count the tasks of one.
MOST_RUNS, _COUNT_SECONDS = 20, 600.0

#: The largest number of tasks that one action on the page can change.
MOST_IDS = 100_000

#: The time limit for reading all ids, in seconds. Reading usually takes a few seconds.
_ALL_IDS_SECONDS = 60.0


class Errors(BaseHandler):
    """Base class of request handlers that send this package's errors as JSON."""

    @property
    def asking(self) -> Asking:
        asking: Asking = self.application.asking
        return asking

    def log_exception(self, typ: Any, value: Any, tb: Any) -> None:
        """Log a traceback, except for this package's errors."""
        if not isinstance(value, NativeDelayError):
            super().log_exception(typ, value, tb)

    def send_error(self, status_code: int = 500, **kwargs: Any) -> None:
        """Send an error response; this package's errors are sent as JSON."""
        error = (kwargs.get("exc_info") or (None, None))[1]
        if isinstance(error, NativeDelayError) and not self._finished:
            self.clear()
            self.set_status(503 if isinstance(error, StoreUnavailable) else 400)
            self.finish({"error": str(error)})
        else:
            super().send_error(status_code, **kwargs)

    def write_json(self, made: bytes) -> None:
        self.set_header("Content-Type", "application/json; charset=UTF-8")
        self.write(made)

    def query(self, search: str) -> Query:
        """Return a query with the search text and the request's range of due times."""
        edges = (self.get_argument(name, None, type=int) for name in ("from_us", "until_us"))
        return Query.parse(search).due_within(*edges)


class PageHandler(Errors):
    """Renders one HTML page: "delays", "rates", "schedules" or "runs"."""

    def initialize(self, name: str) -> None:
        self._name = name

    @web.authenticated
    def get(self) -> None:
        options = self.application.options
        prefix = self.reverse_url("delays-static", "")
        ours = {"static_path": STATIC, "static_url_prefix": prefix}
        self.render(
            f"{self._name}.html",
            name=self._name,
            time_zone=str(self.capp.timezone),
            static=partial(web.StaticFileHandler.make_static_url, ours),
            has_link=self._name in self.application.linked,
            read_only=options.read_only,
            api_closed=not (options.basic_auth or options.auth or self.unauthenticated_api),
        )


class Shared(Errors):
    """Base class of request handlers that cache one response for all open pages."""

    kept_as: str
    """The name of the attribute of Flower's application that caches the response."""
    kept_seconds = 2.0

    async def answer(self) -> dict[str, Any]:
        raise NotImplementedError

    @web.authenticated
    async def get(self) -> None:
        """Send the cached response, which is at most two seconds old."""
        kept = getattr(self.application, self.kept_as, None)
        if kept is None or (kept[1].done() and monotonic() - kept[0] > self.kept_seconds):
            kept = (monotonic(), asyncio.ensure_future(self.answer()))
            setattr(self.application, self.kept_as, kept)
        self.write(await kept[1])


class Summary(Shared):
    """Sends the counts of waiting tasks and the histogram of due times."""

    kept_as = "delays_summary"

    async def answer(self) -> dict[str, Any]:
        """Return the counts of waiting tasks, their problems, and the histogram of due times.

        Without a store, the counts come from the broker, the histogram is empty, and ``error`` says
        how to set one.
        """
        status, findings = await self.asking.admin(_status)
        found: dict[str, Any] = {
            "waiting": status["waiting"],
            "parked": status["parked"],
            "stuck": status.get("stuck"),
            "levels": [
                level for level in status.get("levels", ()) if level["waiting"] or level["stuck"]
            ],
            "next_due_us": None,
            "next_due_within_seconds": status.get("next_due_within_seconds"),
            "overdue": status.get("overdue"),
            "problems": [
                {"problem": each.problem, "remedy": each.remedy}
                for each in findings
                if each.level == WRONG
            ],
            "histogram": [],
            "holds": [],
            "error": None,
        }
        try:
            if "runs" not in self.application.linked:
                await self._link_runs()
            return found | await self.asking.delay(_numbers)
        except NoStore as exc:
            return found | {"error": str(exc)}

    async def _link_runs(self) -> None:
        if await self.asking.delay(lambda _: runs_of(self.capp, 1, counts=False)):
            self.application.linked.add("runs")


class LinesHandler(Shared):
    """Sends the lines (waiting tasks with the same rate limit and key), longest line first."""

    kept_as = "delays_lines"
    kept_seconds = 1.0

    async def answer(self) -> dict[str, Any]:
        lines = await self.asking.delay(lambda delay: delay.rates(limit=MOST_LINES + 1))
        return {
            "lines": [asdict(line) for line in lines[:MOST_LINES]],
            "more": len(lines) > MOST_LINES,
            "now_us": round(time() * 1e6),
        }


class ScheduleEntries(Shared):
    """Sends the schedule entries, sorted by name."""

    kept_as = "schedule_entries"
    kept_seconds = 1.0

    async def answer(self) -> dict[str, Any]:
        entries = await self.asking.delay(lambda delay: list(delay.schedules()))
        return {"entries": [entry.as_json() for entry in entries], "now_us": round(time() * 1e6)}


def _status(part: AdminPart) -> tuple[dict[str, Any], list[Finding]]:
    status = part.status()
    return dict(status.facts), list(status.found)


def _numbers(delay: Delay) -> dict[str, Any]:
    bars = delay.histogram(bars=_BARS)
    now_us = round(time() * 1e6)
    ahead = delay.ls(Query(from_us=now_us, until_us=HELD_FROM_US), limit=1)
    return {
        "waiting": delay.count(),
        # Overdue tasks have their own number.
        "next_due_us": ahead[0].due_us if ahead else None,
        "overdue": delay.count(Query(until_us=now_us)),
        "holds": [each.as_json() for each in delay.holds() if each.mode != "RetryAfter"],
        "histogram": [[bar.from_us, bar.until_us, bar.count] for bar in bars],
    }


class RunsHandler(Shared):
    """Sends the runs of Spark fan-outs, those with the latest tasks first.

    Their waiting tasks are counted in the background, for a tenth of the time at most.
    """

    kept_as = "delays_runs"

    async def answer(self) -> dict[str, Any]:
        flower = self.application
        runs = await self.asking.delay(lambda _: runs_of(self.capp, MOST_RUNS, counts=False))
        if monotonic() >= flower.count_runs_at:
            flower.count_runs_at = math.inf
            flower.counting = asyncio.ensure_future(self._count([run.run_id for run in runs]))
        numbers = flower.run_counts
        shown = [run.as_json() | numbers.get(run.run_id, {}) for run in runs]
        return {"runs": shown, "now_us": round(time() * 1e6)}

    async def _count(self, run_ids: list[str]) -> None:
        flower, began = self.application, monotonic()
        try:
            for run_id in run_ids:
                asked = partial(_status_of, Run(run_id, app=self.capp))
                status = await self.asking.delay(asked, within_seconds=_COUNT_SECONDS)
                flower.run_counts[run_id] = {"waiting": status.waiting, "left": status.left}
        except NativeDelayError:  # the list has the same
            flower.run_counts.clear()
        finally:
            took_seconds = monotonic() - began
            flower.count_runs_at = monotonic() + max(10 * took_seconds, self.kept_seconds)


def _status_of(run: Run, _: Delay) -> RunStatus:
    return run.status()


class ParkedHandler(Errors):
    @web.authenticated
    async def get(self) -> None:
        """Respond with the number of parked messages (``total``), and up to 50 of them (``tasks``).

        Parked messages are due, but have no bound queue. Both fields are null while a worker is
        delivering parked messages.
        """
        found = await self.asking.admin(lambda part: part.parked(limit=_PARKED))
        if found is None:
            self.write({"total": None, "tasks": None})
            return
        total, tasks = found
        self.write({"total": total, "tasks": [asdict(task) for task in tasks]})


class DataTable(Errors):
    @web.authenticated
    async def get(self) -> None:
        """Send one page of the waiting tasks to the JavaScript library DataTables."""
        draw = self.get_argument("draw", type=int, required=True)
        offset = max(self.get_argument("start", 0, type=int), 0)
        limit = min(max(self.get_argument("length", 15, type=int), 1), 500)
        answer = {"draw": draw, "data": [], "recordsTotal": 0, "recordsFiltered": 0}
        try:
            query = self.query(self.get_argument("search[value]", "", escape=False))
            (page, counted), in_all = await self.asking.delay(
                lambda delay: (listed(delay, query, offset, limit), delay.count())
            )
        except InvalidQuery as exc:
            self.write(answer | {"searchError": str(exc)})
            return
        except StoreUnavailable as exc:
            self.write(answer | {"unavailable": str(exc)})
            return
        answer["data"] = [
            task.as_json() | {"due_us": round(task.due.timestamp() * 1e6)} for task in page
        ]
        answer |= {"recordsTotal": in_all, "recordsFiltered": page.total, "counted": counted}
        self.write(answer)


def long_json(answer: dict[str, Any], name: str, items: Iterable[Any]) -> bytes:
    """Encode the dict *answer* as JSON, and add the list *items* under the key *name*.

    Call this function in a thread: encoding a long list would block Flower.
    """
    text = f'{json.dumps(answer)[:-1]}, "{name}": [{", ".join(map(json.dumps, items))}]}}'
    return text.encode()


class Story(Errors):
    @web.authenticated
    async def get(self) -> None:
        """Send sentences about the task ``id``: where it is, and why it waits."""
        task_id = self.get_argument("id")
        self.write({"story": await self.asking.delay(lambda delay: delay.story(task_id))})


class MatchingIds(Errors):
    @web.authenticated
    async def get(self) -> None:
        """Send the ids of all waiting tasks that match the search."""
        query = self.query(self.get_argument("search", "", escape=False))

        def found(delay: Delay) -> bytes:
            ids = delay.ids(query, limit=MOST_IDS + 1)
            if len(ids) > MOST_IDS:
                raise InvalidQuery(
                    f"expected at most {MOST_IDS:,} tasks at a time, found more: narrow the search"
                )
            return long_json({"total": len(ids)}, "ids", ids)

        self.write_json(await self.asking.delay(found, within_seconds=_ALL_IDS_SECONDS))

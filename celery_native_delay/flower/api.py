"""The REST API for waiting tasks, with Flower's authentication."""

from __future__ import annotations

import asyncio
import json
from base64 import b64decode
from collections.abc import Callable
from dataclasses import asdict
from datetime import datetime
from functools import partial
from typing import Any, TypeVar

from flower.api import BaseApiHandler
from tornado import escape, web

from ..app.delay import Delay, listed
from ..app.holds import TAKEN_UP_SECONDS
from ..app.runs import Run, runs_of
from ..durations import moment_of, seconds_of
from ..errors import InvalidDueTime, InvalidQuery
from ..records.waiting import Outcome
from ..transports.interface import AdminPart
from .pages import Errors, ParkedHandler, ScheduleEntries, long_json

T = TypeVar("T")

#: The time limit of a change, in seconds. Changing one task takes a millisecond or two.
_CHANGE_SECONDS = 60.0

#: The time limit of a change of many tasks, in seconds: some milliseconds for each.
_MANY_SECONDS = 86_400.0

TAKES_LONGER = "it takes some time: the page shows when it is done"

#: The largest number of ids in one request, so that the request ends within the time limit.
_MOST_AT_ONCE = 1000

_CHANGES: dict[str, Callable[..., list[Outcome]]] = {
    "cancel": Delay.cancel_all,
    "reschedule": Delay.reschedule_all,
    "run-now": Delay.run_all_now,
}


#: The fields of a schedule entry in a request.
_FIELDS: dict[str, type] = {
    "task": str,
    "schedule": str,
    "args": list,
    "kwargs": dict,
    "options": dict,
}
_JSON: dict[type, str] = {str: "a text", list: "a JSON list", dict: "a JSON object"}


class ApiHandler(Errors, BaseApiHandler):
    """Base class of the REST API's handlers, with Flower's authentication and JSON errors."""

    def write_error(self, status_code: int, **kwargs: Any) -> None:
        """Send an error response; status 401 makes browsers ask for a password."""
        if status_code == 401 and self.application.options.basic_auth:
            self.set_header("WWW-Authenticate", 'Basic realm="flower"')
        super().write_error(status_code, **kwargs)

    def limit(self) -> int:
        limit: int = self.get_argument("limit", 50, type=int)
        if not 1 <= limit <= 10_000:
            raise InvalidQuery(f"expected limit from 1 to 10000, got {limit}")
        return limit

    def changes(self) -> None:
        """Raise HTTP error 403 if Flower is in read-only mode."""
        if self.application.options.read_only:
            raise web.HTTPError(403, "Read only mode is enabled")

    def moment(self, body: dict[str, Any]) -> dict[str, Any]:
        """Return the new due time from the request.

        ``countdown``, ``by`` and ``spread`` are durations, and ``eta`` is ISO 8601. ``when`` is
        what a user writes: ``2 h`` from now, ``+2 h`` later than the task is due now,
        ``tomorrow 09:00`` or ISO 8601 in the app's time zone.
        """
        names = ("countdown", "eta", "by", "spread", "when")
        given = {name: body.get(name, self.get_argument(name, None)) for name in names}
        found = {name: value for name, value in given.items() if value is not None}
        when = str(found.pop("when", "")).strip()
        if when.startswith(("+", "-")):
            found["by"] = when
        elif when:
            found["eta"] = moment_of(when, datetime.now(self.capp.timezone))
        for name in ("countdown", "by", "spread"):
            if name in found:
                try:
                    found[name] = seconds_of(str(found[name]))
                except InvalidDueTime as exc:
                    raise InvalidDueTime(f"{name}: {exc}") from exc
        return found

    def body(self) -> dict[str, Any]:
        """Return the JSON object in the request, or {} if the body is not JSON."""
        text = self.request.body.strip()
        is_json = "json" in self.request.headers.get("Content-Type", "json")
        if not text or not (is_json or text.startswith((b"{", b"["))):
            return {}
        try:
            found = json.loads(text)
        except ValueError as exc:
            raise web.HTTPError(400, f"expected JSON, {exc}") from exc
        if not isinstance(found, dict):
            raise web.HTTPError(400, f"expected a JSON object, got {type(found).__name__}")
        return found

    async def change(self, verb: str, ids: list[str], body: dict[str, Any]) -> list[Outcome]:
        """Cancel, reschedule or run the waiting tasks *ids*, and return the outcomes."""
        moment = self.moment(body) if verb == "reschedule" else {}
        outcomes = await self.asking.delay(
            lambda delay: _CHANGES[verb](delay, ids, **moment), within_seconds=_CHANGE_SECONDS
        )
        self.application.delays_summary = None
        return outcomes

    async def begun(self, change: Callable[[Delay], T]) -> T | None:
        """Begin a change of many tasks; return its result, or None if it takes longer."""
        asked = asyncio.ensure_future(self.asking.delay(change, within_seconds=_MANY_SECONDS))
        done, _ = await asyncio.wait({asked}, timeout=2 * TAKEN_UP_SECONDS)
        self.application.delays_summary = None
        return done.pop().result() if done else None


class ListDelays(ApiHandler):
    @web.authenticated
    async def get(self) -> None:
        """Respond with the waiting tasks that match the request's search text and due times.

        ``total`` is null if the search has 1,000 or more matches beyond the sent tasks.
        """
        limit, offset = self.limit(), self.get_argument("offset", 0, type=int)
        query = self.query(self.get_argument("search", "", escape=False))

        def found(delay: Delay) -> bytes:
            page, counted = listed(delay, query, offset, limit)
            total = page.total if counted else None
            answer = {"total": total, "waiting": delay.count(), "offset": offset}
            return long_json(answer, "tasks", (task.as_json() for task in page))

        self.write_json(await self.asking.delay(found))


class ListRates(ApiHandler):
    @web.authenticated
    async def get(self) -> None:
        """Send up to ``limit`` lines (tasks with the same rate limit and key), longest first."""
        limit = self.limit()
        lines = await self.asking.delay(lambda delay: delay.rates(limit=limit + 1))
        self.write(
            {"more": len(lines) > limit, "lines": [line.as_json() for line in lines[:limit]]}
        )


class ListSchedules(ApiHandler, ScheduleEntries):
    """Sends the schedule entries, sorted by name."""


class ChangeSchedule(ApiHandler):
    @web.authenticated
    async def post(self, verb: str, name: str | None = None) -> None:
        """Change a schedule entry; send 404 if the name is unknown.

        The URL or the body ``{"name": …}`` contains the name. To ``add`` or ``change`` an entry,
        the body also has ``task``, ``schedule``, ``args``, ``kwargs`` and ``options``.
        """
        self.changes()
        body = self.body()
        name = body.get("name") if name is None else name
        if not isinstance(name, str):
            raise web.HTTPError(400, "expected the name of a schedule entry")
        given = {field: body[field] for field in _FIELDS if body.get(field) is not None}
        fields = given if verb in ("add", "change") else {}
        for field, kind in _FIELDS.items():
            is_missing = verb == "add" and kind is str and field not in fields
            if is_missing or not isinstance(fields.get(field, kind()), kind):
                raise web.HTTPError(400, f"expected {field} to be {_JSON[kind]}")

        def change(delay: Delay) -> dict[str, Any]:
            try:
                task_id = getattr(delay.schedules(), verb.replace("-", "_"))(name, **fields)
            except KeyError as exc:
                return {"error": str(exc.args[0])}
            return {"name": name, "task_id": task_id}

        answer = await self.asking.delay(change, within_seconds=_CHANGE_SECONDS)
        self.application.schedule_entries = None
        if "error" in answer:
            self.set_status(404)
        self.write(answer)


class ListRuns(ApiHandler):
    @web.authenticated
    async def get(self) -> None:
        """Send up to ``limit`` runs of Spark fan-outs, those with the latest tasks first."""
        limit = self.limit()
        runs = await self.asking.delay(
            lambda _: runs_of(self.capp, limit), within_seconds=_MANY_SECONDS
        )
        self.write({"runs": [run.as_json() for run in runs]})


class ChangeRun(ApiHandler):
    @web.authenticated
    async def post(self, verb: str) -> None:
        """Cancel or reschedule all tasks of a run; the JSON body has ``run``, and ``by``.

        Rescheduling many tasks goes on after the answer.
        """
        self.changes()
        body = self.body()
        by: Any = self.moment({"by": body.get("by") or None}).get("by")
        if not isinstance(body.get("run"), str) or (by is None) is (verb == "reschedule"):
            raise web.HTTPError(
                400, "expected the name of a run, and to reschedule it by, as in 2h"
            )
        run = Run(body["run"], app=self.capp)

        def change(_: Delay) -> str:
            if verb == "cancel":
                run.cancel()
                return f"run {run.run_id} is cancelled"
            return f"{run.reschedule(by=by):,} task(s) moved"

        message = await self.begun(change)
        self.application.delays_runs, self.application.count_runs_at = None, 0.0
        self.write({"run": run.run_id, "message": message or TAKES_LONGER})


class ListHolds(ApiHandler):
    @web.authenticated
    async def get(self) -> None:
        """Send the holds, the drops and the pauses of ``RetryAfter``."""
        holds = await self.asking.delay(lambda delay: delay.holds())
        self.write({"holds": [each.as_json() for each in holds]})


class ChangeHolds(ApiHandler):
    @web.authenticated
    async def post(self, verb: str) -> None:
        """Hold, drop or release tasks; the JSON body has ``task``, ``key``, ``search``, ….

        A release that takes longer goes on after the answer, and :class:`ListHolds` lists it.
        """
        self.changes()
        body = self.body()
        given = {name: body[name] for name in ("task", "key", "search", "rate") if body.get(name)}
        if "task" not in given:
            raise web.HTTPError(400, "expected the name of a task, or a pattern such as shop.*")
        if body.get("for"):
            given["seconds"] = seconds_of(str(body["for"]))
        if verb != "release":
            given.pop("rate", None)
            given["by"] = self._user()
        if verb == "drop":
            given.pop("seconds", None)
        found = await self.begun(lambda delay: getattr(delay, verb)(**given))
        if isinstance(found, int):
            self.write({"message": f"{found:,} task(s) released", "released": found})
        elif found is None:
            self.write({"message": TAKES_LONGER})
        else:
            self.write({"message": f"{found.name}: workers follow within 5 s"} | found.as_json())

    def _user(self) -> str:
        if isinstance(self.current_user, str | bytes):  # of OAuth
            return escape.to_unicode(self.current_user)
        login = self.request.headers.get("Authorization", "").partition(" ")[2]
        return b64decode(login).decode().partition(":")[0] or "Flower"


class ListParked(ApiHandler, ParkedHandler):
    """Responds with the parked messages (due, but without a bound queue)."""


class ChangeParked(ApiHandler):
    @web.authenticated
    async def post(self, verb: str) -> None:
        """Deliver or delete parked messages (due, but without a bound queue).

        A request to deliver gets 409 while a worker is delivering parked messages. A request to
        delete with the body ``{"parked": n}`` gets 409 if the number of parked messages is not n.
        """
        self.changes()
        seen = self.body().get("parked")
        if seen is not None and type(seen) is not int:
            raise web.HTTPError(400, "expected parked to be a number of messages")
        try:
            found = await self.asking.admin(
                _requeued if verb == "requeue" else partial(_purged, seen=seen),
                within_seconds=_CHANGE_SECONDS,
            )
        finally:
            self.application.delays_summary = None
        if isinstance(found, str):
            self.set_status(409)
            found = {"error": found}
        self.write(found)


def _requeued(part: AdminPart) -> dict[str, Any] | str:
    outcome = part.requeue()
    if outcome is None:
        return "a worker is delivering them right now; try again"
    return asdict(outcome) | {"message": str(outcome)}


def _purged(part: AdminPart, *, seen: int | None) -> dict[str, Any] | str:
    parked = seen if seen is None else part.backlog().parked
    if parked != seen:
        return f"expected {seen} parked message(s), found {parked}: reload the page"
    return {"purged": part.purge_parked()}


class ShowDelay(ApiHandler):
    @web.authenticated
    async def get(self, task_id: str) -> None:
        """Respond with the waiting messages of a task, or with 404 if the task is not waiting."""
        found = await self.asking.delay(lambda delay: delay.show(task_id))
        if not found:
            raise web.HTTPError(404, f"No task waits with the id '{task_id}'")
        self.write({"id": task_id, "tasks": [task.as_json() for task in found]})


class ChangeOne(ApiHandler):
    @web.authenticated
    async def post(self, verb: str, task_id: str) -> None:
        """Change a waiting task. Send 404 if it is not waiting, 409 if a worker already has it."""
        self.changes()
        (outcome,) = await self.change(verb, [task_id], self.body())
        if not outcome:
            self.set_status(404 if not outcome.tasks else 409)
        self.write(as_json(outcome) | {"message": str(outcome)})


class ChangeMany(ApiHandler):
    @web.authenticated
    async def post(self, verb: str) -> None:
        """Cancel, reschedule or run waiting tasks; the JSON body contains ``{"ids": […]}``."""
        self.changes()
        body = self.body()
        ids = body.get("ids")
        if not (isinstance(ids, list) and all(isinstance(each, str) and each for each in ids)):
            raise web.HTTPError(400, "expected a list of ids in the body")
        if len(ids) > _MOST_AT_ONCE:
            raise web.HTTPError(400, f"expected at most {_MOST_AT_ONCE} ids, got {len(ids)}")
        outcomes = await self.change(verb, ids, body)
        self.write(
            {"done": sum(map(bool, outcomes)), "outcomes": [as_json(each) for each in outcomes]}
        )


def as_json(outcome: Outcome) -> dict[str, Any]:
    return {"id": outcome.id, "verdict": outcome.verdict.value, "due_us": outcome.due_us}

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
from ..app.runs import Run
from ..durations import moment_of, seconds_of
from ..errors import InvalidQuery
from ..records.waiting import Outcome
from ..transports.interface import AdminPart
from .pages import Errors, long_json

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

    def changes(self) -> None:
        """Raise HTTP error 403 if Flower is in read-only mode."""
        if self.application.options.read_only:
            raise web.HTTPError(403, "Read only mode is enabled")

    def moment(self, body: dict[str, Any]) -> dict[str, Any]:
        """Return the new due time that a user has written in ``when``.

        It is ``2 h`` from now, ``+2 h`` later than each task is due now, ``tomorrow 09:00`` or ISO
        8601 in the app's time zone. From then or from now on, ``spread`` makes the tasks due one
        after the other over this time.
        """
        when = str(body.get("when") or "").strip()
        found: dict[str, Any] = {}
        if spread := str(body.get("spread") or "").strip():
            found["spread"] = seconds_of(spread)
        elif not when:
            raise web.HTTPError(400, "expected when, such as 2 h, +2 h or tomorrow 09:00")
        if when.startswith(("+", "-")):
            found["by"] = seconds_of(when)
        elif when:
            found["eta"] = moment_of(when, datetime.now(self.capp.timezone))
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
        limit = self.get_argument("limit", 50, type=int)
        offset = self.get_argument("offset", 0, type=int)
        if not 1 <= limit <= 10_000:
            raise InvalidQuery(f"expected limit from 1 to 10000, got {limit}")
        query = self.query(self.get_argument("search", "", escape=False))

        def found(delay: Delay) -> bytes:
            page, counted = listed(delay, query, offset, limit)
            total = page.total if counted else None
            answer = {"total": total, "waiting": delay.count(), "offset": offset}
            return long_json(answer, "tasks", (task.as_json() for task in page))

        self.write_json(await self.asking.delay(found))


class ChangeSchedule(ApiHandler):
    @web.authenticated
    async def post(self, verb: str) -> None:
        """Change the schedule entry of the JSON body ``{"name": …}``; send 404 if it is unknown.

        To ``add`` or ``change`` an entry, the body also has ``task``, ``schedule``, ``args``,
        ``kwargs`` and ``options``.
        """
        self.changes()
        body = self.body()
        name = body.get("name")
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


class ChangeRun(ApiHandler):
    @web.authenticated
    async def post(self, verb: str) -> None:
        """Cancel or reschedule all tasks of a run; the JSON body has ``run``, and ``by``.

        Rescheduling many tasks goes on after the answer.
        """
        self.changes()
        body = self.body()
        if not isinstance(body.get("run"), str):
            raise web.HTTPError(400, "expected the name of a run")
        if verb == "reschedule" and not body.get("by"):
            raise web.HTTPError(400, "expected by, to reschedule it by, as in 2h")
        by_seconds = seconds_of(str(body["by"])) if verb == "reschedule" else 0.0
        run = Run(body["run"], app=self.capp)

        def change(_: Delay) -> str:
            if verb == "cancel":
                run.cancel()
                return f"run {run.run_id} is cancelled"
            return f"{run.reschedule(by=by_seconds):,} task(s) moved"

        message = await self.begun(change)
        self.application.delays_runs, self.application.count_runs_at = None, 0.0
        self.write({"run": run.run_id, "message": message or TAKES_LONGER})


class ChangeHolds(ApiHandler):
    @web.authenticated
    async def post(self, verb: str) -> None:
        """Hold, drop or release tasks; the JSON body has ``task``, ``key``, ``search``, ….

        A release that takes longer goes on after the answer.
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
        kind, _, login = self.request.headers.get("Authorization", "").partition(" ")
        is_basic = kind.lower() == "basic"  # a proxy may send another one, such as a token
        user = b64decode(login).decode(errors="replace") if is_basic else ""
        return user.partition(":")[0] or "Flower"


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
        moment = self.moment(body) if verb == "reschedule" else {}
        outcomes = await self.asking.delay(
            lambda delay: _CHANGES[verb](delay, ids, **moment), within_seconds=_CHANGE_SECONDS
        )
        self.application.delays_summary = None
        shown = [
            {"id": each.id, "verdict": each.verdict.value, "due_us": each.due_us}
            for each in outcomes
        ]
        self.write({"done": sum(map(bool, outcomes)), "outcomes": shown})

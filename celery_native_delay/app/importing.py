"""Read the schedule entries of RedBeat and of django-celery-beat, to add them once."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any, NamedTuple
from zoneinfo import ZoneInfo

from billiard.exceptions import SoftTimeLimitExceeded
from celery import Celery
from celery.schedules import crontab, schedule

from ..due_time import due_us
from ..errors import NativeDelayError, SettingsError, described, why
from ..schedules.entry import ScheduleEntry, Unreadable
from ..urls import is_redis_url, without_password
from .beat import entry_or_why
from .schedules import Schedules


class Imported(NamedTuple):
    """An entry of another scheduler; *problem* is why it was not added, or None."""

    name: str
    task: str
    schedule: str
    is_paused: bool
    problem: str | None


def imported(app: Celery, into: Schedules, source: str, *, dry_run: bool) -> list[Imported]:
    """Add the entries of *source*, "redbeat" or "django-celery-beat"; return them all."""
    found = _of_redbeat(app) if source == "redbeat" else _of_django(app)
    told = []
    for entry, is_paused in sorted(found, key=lambda each: each[0].name):
        try:
            if isinstance(entry.schedule, Unreadable):
                problem: str | None = entry.schedule.reason
            else:
                problem = into.why_not(entry)
            if problem is None and not dry_run:
                into.add_entry(entry, is_paused=is_paused)
        except NativeDelayError as exc:  # the others can be added
            problem = str(exc)
        told.append(Imported(entry.name, entry.task, entry.words, is_paused, problem))
    return told


def _of_redbeat(app: Celery) -> Iterator[tuple[ScheduleEntry, bool]]:
    from ..records.redis_link import redis_client

    url = app.conf.get("redbeat_redis_url") or app.conf.broker_url
    if not isinstance(url, str) or not is_redis_url(url):
        shown = without_password(url) if isinstance(url, str) else url
        raise SettingsError(
            f"expected RedBeat's Redis, got {shown!r}: set redbeat_redis_url to redis://…"
        )
    prefix = app.conf.get("redbeat_key_prefix") or "redbeat:"
    with closing(redis_client(url)) as client:
        of_code = {name.decode() for name in client.smembers(f"{prefix}:statics")}
        for key in client.zrange(f"{prefix}:schedule", 0, -1):
            name = key.decode().removeprefix(prefix)
            definition, meta = client.hmget(key, "definition", "meta")
            if definition is not None and name not in of_code:  # beat_schedule has the others
                yield _redbeats(app, name, definition, meta or b"{}")


def _redbeats(app: Celery, name: str, definition: bytes, meta: bytes) -> tuple[ScheduleEntry, bool]:
    made: dict[str, Any] = {}
    try:
        made = json.loads(definition, object_hook=_object)
        last = json.loads(meta, object_hook=_object).get("last_run_at")
        when, zone = made["schedule"], app.timezone
        if not isinstance(when, schedule | crontab):
            raise SettingsError(f"expected an interval or a crontab, got {when!r}")
        lists = list(made.get("args") or ()), made.get("kwargs") or {}, made.get("options") or {}
        entry = ScheduleEntry(name, made["task"], when, zone, *lists, _first_us(when, last))
    except (KeyError, TypeError, ValueError, AttributeError) as exc:
        task = str(made.get("task", "?"))
        entry = ScheduleEntry(name, task, Unreadable(why(exc)), app.timezone)
    return entry, not made.get("enabled", True)


def _first_us(when: Any, last_run: datetime | None) -> int | None:
    """Return when an interval is due next, so that it is not late after the import."""
    if last_run is None or not isinstance(when, schedule):
        return None
    return due_us(last_run + when.run_every)


def _object(fields: dict[str, Any]) -> Any:
    """Decode a time or a schedule in RedBeat's JSON."""
    kind = fields.pop("__type__", None)
    if kind == "datetime":
        zone = fields.pop("timezone", None)
        return datetime(**fields, tzinfo=ZoneInfo(zone) if isinstance(zone, str) else UTC)
    if kind == "interval":
        return schedule(fields["every"], relative=fields.get("relative", False))
    if kind == "crontab":
        return crontab(**fields)
    return fields if kind is None else f"{kind} {fields}"


def _of_django(app: Celery) -> Iterator[tuple[ScheduleEntry, bool]]:
    try:
        from django_celery_beat.models import PeriodicTask
        from django_celery_beat.schedulers import ModelEntry
    except SoftTimeLimitExceeded:
        raise
    except Exception as exc:  # it is not installed, or Django is not set up
        raise SettingsError(
            f"expected a Django project with django_celery_beat in INSTALLED_APPS: {described(exc)}"
        ) from exc

    # An entry that cannot be read stays as it is in the database.
    reading = type("Reading", (ModelEntry,), {"_disable": lambda self, model: None})
    for model in PeriodicTask.objects.all():
        try:
            found: Any = reading(model, app=app)
        except (TypeError, ValueError, AttributeError) as exc:
            found = exc
        entry = entry_or_why(model.name, found, app.timezone)
        if entry.starts_us is None:
            entry = replace(entry, starts_us=_first_us(entry.schedule, model.last_run_at))
        yield entry, not model.enabled

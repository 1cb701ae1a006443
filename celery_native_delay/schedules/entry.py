"""A schedule entry, with conversion to and from JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from datetime import UTC, datetime, timedelta, tzinfo
from functools import cached_property, partial
from typing import Any
from zoneinfo import ZoneInfo

from celery.exceptions import ImproperlyConfigured
from celery.schedules import ParseException, crontab, schedule, solar
from kombu.utils.json import dumps, loads

from ..durations import duration, seconds_of
from ..errors import CannotDelay, InvalidDueTime, SettingsError
from .next_due import next_due, with_folds

VERSION = 1

_CRONTAB = ("minute", "hour", "day_of_week", "day_of_month", "month_of_year")
_TIMES = ("schedule", "zone", "starts_us", "ends_us", "one_off")
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)
_SIMPLE = (str, int, float, datetime, timedelta)


@dataclass(frozen=True)
class ScheduleEntry:
    """A schedule entry of Celery, such as an item of ``beat_schedule``.

    The task runs only between *starts_us* and *ends_us* (epoch microseconds). If *one_off* is True,
    the task runs once for each value of *armed*, which changes when a user enables the entry again.
    *armed* is None if this is not known.
    """

    name: str
    task: str
    schedule: Any
    zone: tzinfo
    args: Sequence[Any] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    starts_us: int | None = None
    ends_us: int | None = None
    one_off: bool = False
    armed: str | None = None

    def __post_init__(self) -> None:
        vars(self)["zone"] = with_folds(self.zone)

    def next_us(self, after_us: int) -> int | None:
        """Return the first due time after *after_us* (epoch microseconds); None if none is left."""
        after_us, starts_us = after_us - self.countdown_us, self.starts_us or 0
        if after_us < starts_us and isinstance(self.schedule, schedule):
            at_us = starts_us  # as with django-celery-beat
        else:
            after_us = max(after_us, starts_us - 1)
            found = next_due(self.schedule, _EPOCH + after_us * _MICROSECOND, self.zone)
            if found is None:
                return None
            at_us = (found - _EPOCH) // _MICROSECOND
        return None if self.ends_us and at_us > self.ends_us else at_us + self.countdown_us

    @property
    def countdown_us(self) -> int:
        """Microseconds by which each run is later than scheduled (the option ``countdown``)."""
        return round((self.options.get("countdown") or 0) * 1_000_000)

    @cached_property
    def text(self) -> str:
        """The schedule entry as JSON; a value unknown to JSON is written as its class name."""
        plain = _plain(self.schedule)
        made = {each.name: getattr(self, each.name) for each in fields(self)}
        made |= {"v": VERSION, "zone": str(self.zone), "schedule": plain or _told(self.schedule)}
        whole = plain is not None and (self.zone is UTC or isinstance(self.zone, ZoneInfo))
        try:
            return str(dumps(made | {"whole": whole}, sort_keys=True))
        except (TypeError, ValueError):  # such as an argument of Celery's class BeatLazyFunc
            return json.dumps(made | {"whole": False}, sort_keys=True, default=_kind)

    @classmethod
    def from_text(cls, text: str) -> ScheduleEntry | None:
        """Decode a schedule entry from JSON; None if incomplete or from another version."""
        made = loads(text)
        if made.pop("v") != VERSION or not made.pop("whole"):
            return None
        made |= {"zone": ZoneInfo(made["zone"]), "schedule": _schedule(**made["schedule"])}
        return cls(**made)

    def has_schedule_of(self, text: str) -> bool:
        """Return True if the entry in *text* (JSON) has the same due times as this entry."""
        mine, other = loads(self.text), loads(text)
        return all(mine[name] == other.get(name) for name in _TIMES)

    def is_armed_since(self, text: str) -> bool:
        """Return True if a user enabled this one-off entry after a worker read it as *text*."""
        return self.armed is not None and self.armed != loads(text or "{}").get("armed")

    @property
    def words(self) -> str:
        """The schedule as text for users: ``every 10 s`` or ``30 2 * * * Europe/Berlin``."""
        match self.schedule:
            case crontab() as cron:
                minute, hour, weekday, day, month = map(partial(_cron_field, cron), _CRONTAB)
                return " ".join((minute, hour, day, month, weekday, str(self.zone)))
            case schedule(run_every=every):
                return f"every {duration(every.total_seconds(), exact=True)}"
            case solar() as sun:
                return f"{sun.event} at {sun.lat}, {sun.lon}"
        return str(self.schedule)


def parsed(text: str) -> tuple[Any, tzinfo | None]:
    """Parse a schedule as :attr:`ScheduleEntry.words` writes it; the time zone may be missing.

    Raises SettingsError for any other text.
    """
    fields = text.split()
    try:
        if fields[:1] == ["every"]:
            seconds = seconds_of(" ".join(fields[1:]))
            if seconds > 0:
                return schedule(timedelta(seconds=seconds)), None
        elif fields[1:2] == ["at"]:
            latitude, longitude = " ".join(fields[2:]).split(",")
            return solar(fields[0], float(latitude), float(longitude)), None
        elif len(fields) in (5, 6):
            minute, hour, day, month, weekday, *zone = fields
            return crontab(minute, hour, weekday, day, month), ZoneInfo(*zone) if zone else None
    except (ParseException, InvalidDueTime, ValueError, OverflowError, LookupError, OSError):
        pass
    except (ImproperlyConfigured, ImportError) as exc:  # the package ephem is missing
        raise SettingsError(f"expected what {text!r} needs: {exc}") from exc
    raise SettingsError(
        "expected a schedule such as 'every 10 s', '30 2 * * *' (cron), '30 2 * * * Europe/Berlin' "
        f"or 'sunset at 52.5, 13.4', got {text!r}"
    )


class Unreadable:
    """The schedule of an entry that cannot be read: it has a reason, and no due time."""

    def __init__(self, reason: str) -> None:
        self.reason = reason

    def __str__(self) -> str:
        return "?"

    def remaining_estimate(self, last_run_at: datetime) -> timedelta:
        raise CannotDelay(self.reason)


def _kind(value: Any) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"


def _told(of: Any) -> list[Any]:
    """Return the class and the simple attributes of a schedule, to notice a changed schedule."""
    found = getattr(of, "__dict__", {}).items()
    simple = {name: str(each) for name, each in found if isinstance(each, _SIMPLE)}
    return [_kind(of), {name: each for name, each in simple.items() if name[0] != "_"}]


def _plain(of: Any) -> dict[str, Any] | None:
    if isinstance(of, crontab) and type(of).remaining_delta is crontab.remaining_delta:
        return {"cron": [_cron_field(of, name) for name in _CRONTAB]}
    if type(of) is schedule:
        return {"every": of.run_every.total_seconds(), "relative": bool(of.relative)}
    if type(of) is solar:
        return {"sun": [of.event, of.lat, of.lon]}
    return None


def _cron_field(of: crontab, name: str) -> str:
    """Return a field of a crontab as cron writes it: Celery also takes numbers, lists and sets."""
    given = getattr(of, f"_orig_{name}")
    if isinstance(given, str):
        return given
    if not (numbers := sorted(getattr(of, name))):
        raise CannotDelay(f"expected at least one {name} in a crontab, got {given!r}")
    return ",".join(map(str, numbers))


def _schedule(
    cron: Sequence[str] = (),
    every: float | None = None,
    relative: bool = False,
    sun: Sequence[Any] = (),
) -> Any:
    if every is not None:
        return schedule(timedelta(seconds=every), relative=relative)
    return crontab(*cron) if cron else solar(*sun)

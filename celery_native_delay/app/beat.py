"""Celery's beat: reads the schedule entries of its scheduler, and keeps itself from sending."""

from __future__ import annotations

from typing import Any

from billiard.exceptions import SoftTimeLimitExceeded
from celery import signals
from celery.backends.base import DisabledBackend
from celery.beat import PersistentScheduler, Scheduler
from celery.utils.imports import load_extension_class_names, symbol_by_name
from celery.utils.log import get_logger
from celery.utils.time import maybe_make_aware

from ..errors import SettingsError, described, why
from ..schedules.entry import ScheduleEntry, Unreadable
from .installation import installation_of

logger = get_logger(__name__)

#: The entry points by which Celery finds the short names of schedulers, such as ``django``.
_SCHEDULERS = "celery.beat_schedulers"

#: Packages whose scheduler keeps its entries in Redis, and not in the attribute ``schedule``.
_UNREADABLE = ("redbeat", "redisbeat")


def scheduler_class(app: Any) -> Any:
    """Return a class that reads all entries of the scheduler in the setting ``beat_scheduler``.

    Raises SettingsError if the class cannot be imported, or if its entries cannot all be read.
    """
    named = app.conf.beat_scheduler
    try:
        chosen = symbol_by_name(named, aliases=dict(load_extension_class_names(_SCHEDULERS)))
    except SoftTimeLimitExceeded:
        raise
    except Exception as exc:  # of the user's modules, too
        raise SettingsError(
            f"expected beat_scheduler to name the class of a scheduler, got {named!r}: "
            f"{described(exc)}"
        ) from exc
    for each in chosen.__mro__:
        if each.__module__.partition(".")[0] in _UNREADABLE:
            raise SettingsError(
                f"expected a beat_scheduler whose entries can be read at any time, got {named!r}: "
                f"{each.__qualname__} lists only due entries, or none. Move these entries to "
                f"beat_schedule, or remove this setting and import them once (`delay schedules "
                f"import redbeat`), or run its beat and remove native_delay_schedules"
            )
    # The scheduler of plain Celery also writes a file, which only beat needs.
    return SettingsScheduler if issubclass(chosen, PersistentScheduler) else _reading_all(chosen)


def _reading_all(kind: Any) -> Any:
    """Return a subclass of a scheduler with a database that reads all enabled entries in time.

    The scheduler of django-celery-beat 2.8 or later reads only crontabs for the hours near now. It
    and that of sqlalchemy-celery-beat miss the first change of all, and each change before their
    second look, for five minutes or until the next change.
    """
    own: dict[str, Any] = {}
    if hasattr(kind, "enabled_models_qs"):
        own["enabled_models_qs"] = lambda self: self.Model.objects.enabled()
    if hasattr(kind, "schedule_changed"):

        def schedule_changed(self: Any) -> bool:
            before = getattr(self, "_last_timestamp", None)
            if kind.schedule_changed(self):
                return True
            return before is None and getattr(self, "_last_timestamp", None) is not None

        own["schedule_changed"] = schedule_changed
    return type(kind.__name__, (kind,), own) if own else kind


class SettingsScheduler(Scheduler):  # type: ignore[misc]
    """Reads the entries of Celery's settings; an entry that Celery refuses leaves the others."""

    def install_default_entries(self, data: Any) -> None:
        if not isinstance(self.app.backend, DisabledBackend):  # it has no results to clean up
            super().install_default_entries(data)

    def merge_inplace(self, b: Any) -> None:
        for name, fields in b.items():
            try:
                self.schedule[name] = self._maybe_entry(name, fields)
            except SoftTimeLimitExceeded:
                raise
            except Exception as exc:
                self.schedule[name] = exc


def entry_or_why(name: str, found: Any, zone: Any) -> ScheduleEntry:
    """Return an entry of a scheduler; if it cannot be read, an entry that says why."""
    try:
        if isinstance(found, Exception):
            raise found
        entry = _entry(name, found, zone)
        _ = entry.text
    except SoftTimeLimitExceeded:
        raise
    except Exception as exc:
        task = str(getattr(found, "task", "?"))
        return ScheduleEntry(name, task, Unreadable(why(exc)), zone)
    return entry


def _entry(name: str, found: Any, zone: Any) -> ScheduleEntry:
    model = getattr(found, "model", None)  # of django-celery-beat
    starts, ends = getattr(model, "start_time", None), getattr(model, "expires", None)
    return ScheduleEntry(
        name,
        found.task,
        found.schedule,
        getattr(found.schedule, "tz", None) or zone,
        list(found.args or ()),
        dict(found.kwargs or {}),
        dict(found.options or {}),
        starts and round(maybe_make_aware(starts).timestamp() * 1_000_000),
        ends and round(maybe_make_aware(ends).timestamp() * 1_000_000),
        bool(getattr(model, "one_off", False)),
        _armed(model),
    )


def _armed(model: Any) -> str | None:
    """Return a text that changes if a user of django-celery-beat enables a one-off entry again."""
    if not getattr(model, "one_off", False) or not hasattr(model, "refresh_from_db"):
        return None
    return None if model.total_run_count else f"{model.pk} {model.last_run_at}"


class _Idle(Scheduler):  # type: ignore[misc]
    def setup_schedule(self) -> None: ...

    def tick(self, *args: Any, **kwargs: Any) -> float:
        return float(self.max_interval)


@signals.beat_init.connect(weak=False)  # type: ignore[untyped-decorator]
@signals.beat_embedded_init.connect(weak=False)  # type: ignore[untyped-decorator]
def keep_beat_idle(sender: Any = None, **_: Any) -> None:
    """Replace the scheduler of ``celery beat`` by an idle scheduler, and log why."""
    installation = installation_of(sender.app)
    if installation is None or not installation.delays_new:
        return
    if installation.settings().schedules:
        vars(sender)["scheduler"] = _Idle(sender.app)
        logger.warning(
            "native delay: this beat sends nothing and need not run: schedule entries wait in the "
            "broker (native_delay_schedules)"
        )

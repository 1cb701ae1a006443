"""Checks of everything that may be wrong with the delays of an app."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

from kombu.exceptions import OperationalError

from ..errors import (
    FenceUnavailable,
    NativeDelayError,
    NotPermitted,
    SettingsError,
    UnsupportedBroker,
)
from ..fence import fence_store
from ..finding import UNCHECKED, WRONG, Finding
from ..settings import DelaySettings
from ..urls import without_password
from .installation import installed
from .parts import TIMEOUT_SECONDS, admin_part, bounded_connection

#: Bytes that are written to see whether a folder takes what workers are going to write there.
_TRIED_BYTES = 65_536

_WAYS_OUT: tuple[tuple[type[Exception], str], ...] = (
    (SettingsError, "correct the setting, in workers and producers alike"),
    (NotPermitted, "have this user granted what is named, or ask as one who may"),
    (UnsupportedBroker, "use a broker that fits, or set native_delay_enabled = False"),
)

_START_IT = (
    "start it, or correct host, user and password of its URL (broker_url, celery -b), in workers "
    "and producers"
)


def examine(app: Any) -> list[Finding]:
    """Findings of what is wrong with *app* or could not be looked at; [] if all is well."""
    installation = installed(app)
    try:
        settings = installation.settings()
    except SettingsError as exc:
        return [_failed("settings", exc)]
    found = [*_of_broker(app), *_of_fence(settings), *_of_telemetry(settings)]
    return list(dict.fromkeys(found))


def _of_broker(app: Any) -> Iterator[Finding]:
    try:
        with bounded_connection(app) as connection:
            yield from _looks(app, connection)
    except NativeDelayError as exc:
        yield _failed("broker", exc)


def _looks(app: Any, connection: Any) -> Iterator[Finding]:
    away = OperationalError, OSError, *connection.connection_errors, *connection.channel_errors
    try:
        connection.ensure_connection(max_retries=1, interval_start=0)
        if _delays_by_itself(connection):
            problem = f"{connection.as_uri()} delays by itself, and has nothing to ask"
            yield Finding("broker", UNCHECKED, problem, "see to it with its own means")
            return
        part = admin_part(app, connection)
        looks: list[Callable[[], list[Finding]]] = [part.verify, part.examine]
        for look in looks:
            try:
                yield from look()
            except NativeDelayError as exc:
                yield _failed("broker", exc)
    except away as exc:
        problem = f"the broker {connection.as_uri()} cannot be used: {type(exc).__name__}: {exc}"
        yield Finding("broker", WRONG, problem, _START_IT)


def _delays_by_itself(connection: Any) -> bool:
    delaying = getattr(connection.transport, "delaying", False)
    return delaying and not hasattr(connection.default_channel, "admin_part")


def _failed(check: str, exc: NativeDelayError) -> Finding:
    fitting = (way_out for kind, way_out in _WAYS_OUT if isinstance(exc, kind))
    return Finding(check, WRONG, str(exc), next(fitting, "do what it says, and ask again"))


def _of_fence(settings: DelaySettings) -> list[Finding]:
    if settings.fence is None:
        return []
    try:
        with fence_store(settings.fence, timeout_seconds=TIMEOUT_SECONDS) as store:
            return store.findings()
    except FenceUnavailable as exc:
        where = without_password(settings.fence)
        return [Finding("fence", WRONG, f"{where}: {exc}", "correct native_delay_fence")]


def _of_telemetry(settings: DelaySettings) -> Iterator[Finding]:
    """Findings about this machine's folder; those of workers elsewhere cannot be seen from here."""
    if settings.telemetry is None:
        return
    folder = Path(settings.telemetry).absolute()
    file = folder / f".trial-{uuid4().hex}"
    try:
        if not folder.is_dir():
            yield Finding(
                "telemetry",
                WRONG,
                f"{folder} is no folder on this machine, so no worker here has written to it",
                "make it, for the user whose workers run here to write to, or ask on a machine "
                "with workers",
            )
            return
        try:
            with file.open("wb") as trial:
                trial.write(bytes(_TRIED_BYTES))
                trial.flush()
                os.fsync(trial.fileno())
        finally:
            file.unlink(missing_ok=True)
    except OSError as exc:
        problem = f"{folder} takes nothing on this machine: {exc.strerror or exc}"
        way_out = "make room there, and let the user write whose workers run here"
        yield Finding("telemetry", WRONG, problem, way_out)

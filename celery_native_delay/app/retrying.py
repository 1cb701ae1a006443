"""Retries a task that raises ``RetryAfter``, and pauses all tasks with its rate limit and key."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import closing
from functools import partial, wraps
from inspect import Signature
from typing import Any

from billiard.exceptions import SoftTimeLimitExceeded
from celery.utils.log import get_logger

from ..errors import described
from ..now import time_ns, utc_now
from ..rates.line import Asked, Line, places_in
from ..rates.rate import Rate
from ..rates.retry_after import RETRIED_FOR_SECONDS, RetryAfter
from ..records.waiting import PLACE
from .broker import bounded
from .installation import Installation, delaying_channel
from .transactions import teach_transactions

logger = get_logger(__name__)

#: The header with the time of the task's first RetryAfter, in seconds since the epoch.
SINCE = "native_delay_retry_after"


def task_from_fun(installation: Installation, *args: Any, **options: Any) -> Any:
    """Make a task that may raise RetryAfter. Replaces ``app._task_from_fun``."""
    task = installation.task_from_fun(*args, **options)
    _teach(installation, task)
    return task


def register_task(installation: Installation, *args: Any, **options: Any) -> Any:
    """Register a task of a class that may raise RetryAfter. Replaces ``app.register_task``."""
    task = installation.register_task(*args, **options)
    known = installation.app._tasks.get(getattr(task, "name", None))
    if known is None:  # a subclass of Celery may return nothing
        teach_tasks(installation)
    else:
        _teach(installation, known)
    return task


def teach_tasks(installation: Installation, **_: Any) -> None:
    """Teach the app's tasks RetryAfter, even tasks that were made before ``install``."""
    for task in list(installation.app._tasks.values()):  # app.tasks would finalize the app
        _teach(installation, task)
    for task in installation.app._pending:  # made at their first use, by Celery's own function
        task.__then__(_teach, installation, task)


def _teach(installation: Installation, task: Any) -> None:
    # Inside Celery's autoretry, which would handle it like any other error.
    attribute = "_orig_run" if hasattr(task, "_orig_run") else "run"
    run = getattr(task, attribute)
    if not hasattr(run, "native_delay_original") and not task.name.startswith("celery."):
        setattr(task, attribute, _retrying(installation, task, run))
        teach_transactions(installation.app, task)


def _retrying(installation: Installation, task: Any, run: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(run)
    def until_retry_after(*args: Any, **kwargs: Any) -> Any:
        try:
            return run(*args, **kwargs)
        except RetryAfter as exc:
            request = task.request
            if request.called_directly or not installation.enabled:
                raise
            settings = installation.settings()
            longest_seconds = min(RETRIED_FOR_SECONDS, settings.longest_delay_seconds)
            seconds = min(exc.seconds(utc_now()), longest_seconds)
            headers = dict(request.as_execution_options().get("headers") or {})
            headers.pop(PLACE, None)
            now = time_ns() / 1e9
            since = headers.setdefault(SINCE, now)
            for rate in settings.rates_by_task.get(task.name, ())[: 1 - request.is_eager]:
                known = rate.signature_of(task.name, run)
                limit = limit_of_call(
                    task.name, request.id, rate, known, lambda: (args, kwargs), headers
                )
                _hold(installation.app, task.name, limit, seconds, headers)
            if not isinstance(since, int | float) or now - since > RETRIED_FOR_SECONDS:
                raise
            # In eager mode every retry counts: Celery retries at once, and would never end.
            uncounted = not (exc.counts or request.is_eager)
            most = request.retries if uncounted else None
            request.retries -= uncounted
            try:
                raise task.retry(
                    countdown=seconds, exc=exc, headers=headers, max_retries=most
                ) from exc
            finally:
                request.retries += uncounted
                if uncounted:  # Celery keeps a max_retries for the task's next retry
                    vars(task).pop("override_max_retries", None)

    until_retry_after.native_delay_original = run  # type: ignore[attr-defined]
    return until_retry_after


def _hold(app: Any, task: str, limit: Asked, seconds: float, headers: dict[str, Any]) -> None:
    """Pause the tasks of a rate limit and key; write the retried task's place into *headers*."""
    try:
        with bounded(app) as connection:
            channel, settings = delaying_channel(app, connection)
            with closing(channel.lines(settings)) as lines:
                place = lines.change(limit, partial(Line.hold, wait_us=round(seconds * 1_000_000)))
        headers[PLACE] = json.dumps(places_in(headers.get(PLACE)) | {limit.line: place})
    except SoftTimeLimitExceeded:
        raise
    except Exception as problem:  # the task is retried all the same
        told = "native delay: RetryAfter pauses only this task, not others of %s: %s"
        logger.error(told, task, described(problem))


def limit_of_call(
    task: str,
    task_id: str,
    rate: Rate,
    signature: Signature | None,
    call: Callable[[], tuple[Any, Any]],
    headers: Mapping[str, Any],
) -> Asked:
    """Return the rate limit and the key of one call of a task.

    *call* is a function that returns the call's arguments and keyword arguments. *signature* is the
    signature of the task's function. If the key cannot be computed, return *rate* without a key. If
    the key's own limit (``Rate.overrides``) cannot be computed, return *rate* with the key. Both
    errors are logged.
    """
    key = None
    try:
        if rate.key is not None:
            key = rate.key_of(*call(), headers, signature)
        return Asked(str(rate.name), key, rate.for_key(key))
    except SoftTimeLimitExceeded:
        raise
    except Exception as exc:  # the user's callables or a malformed message may raise anything
        logger.error(
            "native delay: cannot compute the rate key of %s[%s], or the limit of its key: %s",
            task,
            task_id,
            described(exc),
        )
        return Asked(str(rate.name), key, rate)

"""Writes telemetry: a line of JSON when a task starts, and another when the task ends.

Each process of a worker appends to its own file of the day (UTC), ``<day>_<worker>_<pid>.jsonl``.
Each line is one unbuffered write, so a SIGKILL loses no written line. A failing write never stops a
task. ``spark.reconcile`` reads the files.

- The process that runs the task writes a line at the start, with ``finished`` and ``outcome`` null,
  and a line at the end.
- The main process writes one line, with ``started`` null, for a task that never started (revoked or
  expired).
- The main process also writes such a line if the process that ran the task was killed or timed out.
  In this case, only the line at the start has the start time.

``waited`` is true if the message waited in the broker until its due time. ``waited`` is false if a
producer with this package sent the message after its due time. Otherwise ``waited`` is null.

Before Celery 5.7, the line about a killed or timed-out process may have more null fields:
``root_id``, ``queue``, ``retries``, ``due`` and ``waited``.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from time import time_ns
from typing import Any

from billiard.exceptions import TimeLimitExceeded, WorkerLostError
from celery import signals, states
from celery.utils.log import get_logger

from ..app.installation import Installation, installation_of
from ..due_time import due_us_or_none
from ..durations import DAY_US
from ..message import due_ms_of
from ..now import moment
from ..rates.retry_after import RetryAfter
from .arrival import queue_of

logger = get_logger(__name__)

#: The fields of a line, in this order, with their types in Spark SQL.
FIELDS = {
    "id": "string",
    "task": "string",
    "root_id": "string",
    "worker": "string",
    "pid": "bigint",
    "queue": "string",
    "retries": "bigint",
    "due": "timestamp",
    "started": "timestamp",
    "finished": "timestamp",
    "outcome": "string",
    "retry_due": "timestamp",
    "waited": "boolean",
}

#: Lines with equal values of these fields are about the same attempt.
ATTEMPT_KEY = ("id", "retries", "started", "worker", "pid")

SUCCESS = "success"
IGNORED = "ignored"
"""The task raised ``Ignore``, for example by ``self.replace()``."""
FAILURE = "failure"
RETRY = "retry"
REQUEUED = "requeued"
"""The task comes again with the same number of retries: it raised ``RetryAfter``, or
``Reject(requeue=True)``."""
REJECTED = "rejected"
LOST = "lost"
"""The process that ran the task died."""
TIMEOUT = "timeout"
REVOKED = "revoked"
EXPIRED = "expired"
TERMINATED = "terminated"

DONE = (SUCCESS, IGNORED)
GIVEN_UP = (FAILURE, REJECTED, LOST, TIMEOUT, REVOKED, EXPIRED, TERMINATED)
COMES_AGAIN = (RETRY, REQUEUED)
RAN_TO_ITS_END = (SUCCESS, FAILURE, RETRY, REJECTED)
"""Outcomes of a task whose function returned or raised an exception."""

#: The message property that tells the name of the queue to the process that runs the task. Celery
#: passes only the routing key to this process. A field of the request would be sent with retries.
QUEUE = "native_delay_queue"

#: The message property with the result of :func:`waited`.
WAITED = "native_delay_waited"

#: The request's attribute for the start of its task, in microseconds since the epoch.
STARTED = "native_delay_started_us"

_as_json = json.JSONEncoder(separators=(",", ":"), default=str).encode

#: Stands for a message that does not say if it waited.
_UNTOLD = object()

_OUTCOMES = {
    states.SUCCESS: SUCCESS,
    states.RETRY: RETRY,
    states.IGNORED: IGNORED,
    states.REJECTED: REJECTED,
    states.FAILURE: FAILURE,
}

#: Failures that only the worker's main process sees.
_ENDED_FROM_OUTSIDE: tuple[tuple[type[BaseException], str], ...] = (
    (TimeLimitExceeded, TIMEOUT),
    (WorkerLostError, LOST),
)


class Telemetry:
    """Writes telemetry of one app's tasks when Celery sends signals.

    Create the object before the pool forks, so that child processes get the signals, too.
    """

    def __init__(self, installation: Installation, consumer: Any, folder: str) -> None:
        self.folder = Path(folder).absolute()
        self._installation = installation
        self._consumer = consumer
        self._worker = str(consumer.hostname)
        self._lines = DailyFiles(self.folder, self._worker)
        self._receivers: tuple[tuple[Any, Callable[..., None]], ...] = (
            (signals.task_received, self._on_received),
            (signals.task_prerun, self._on_start),
            (signals.task_postrun, self._on_end),
            (signals.task_failure, self._on_failure),
            (signals.task_revoked, self._on_revoked),
        )

    def connect(self) -> None:
        for signal, receiver in self._receivers:
            signal.connect(receiver, weak=False)

    def disconnect(self) -> None:
        for signal, receiver in self._receivers:
            signal.disconnect(receiver)
        self._lines.close()

    # --- receivers ------------------------------------------------------------------------

    def _on_received(self, sender: Any = None, request: Any = None, **_: Any) -> None:
        if sender is self._consumer:
            facts = {
                QUEUE: queue_of(sender, request.message) or None,
                WAITED: waited(request.message, now_ms=now_us() // 1000),
            }
            properties = request.request_dict.get("properties") or {}
            known = {name: value for name, value in facts.items() if value is not None}
            request.request_dict["properties"] = {**properties, **known}

    def _on_start(self, sender: Any = None, **_: Any) -> None:
        request = self._request_of(sender)
        if request is None:
            return
        started_us = now_us()
        setattr(request, STARTED, started_us)
        for name in (QUEUE, WAITED):
            setattr(request, name, (request.properties or {}).pop(name, None))
        self._write(sender, request, started_us=started_us)

    def _on_end(self, sender: Any = None, state: Any = None, retval: Any = None, **_: Any) -> None:
        request = self._request_of(sender)
        if request is None:
            return
        outcome, finished_us = outcome_of(state, retval), now_us()
        self._write(
            sender,
            request,
            started_us=getattr(request, STARTED, None),
            finished_us=finished_us,
            outcome=outcome,
            retry_due_us=retry_due_us(outcome, retval, finished_us),
        )

    def _on_failure(
        self, sender: Any = None, task_id: Any = None, exception: Any = None, **_: Any
    ) -> None:
        """Write the end of a task whose process was killed or timed out."""
        for kind, outcome in _ENDED_FROM_OUTSIDE:
            if isinstance(exception, kind) and self._is_ours(sender):
                # Celery sets the task's request only for some of these failures.
                request = sender.request if sender.request.id == task_id else None
                self._write_ending(sender, task_id, request, outcome)
                return

    def _on_revoked(
        self,
        sender: Any = None,
        request: Any = None,
        terminated: bool = False,
        expired: bool = False,
        **_: Any,
    ) -> None:
        if self._is_ours(sender):
            ending = EXPIRED if expired else REVOKED
            outcome = TERMINATED if terminated else ending
            self._write_ending(sender, request.id, request, outcome)

    # --- lines ------------------------------------------------------------------------------

    def _is_ours(self, task: Any) -> bool:
        return installation_of(task.app) is self._installation

    def _request_of(self, task: Any) -> Any:
        """Return the task's Celery request; None if the task is eager or of another app."""
        if not self._is_ours(task) or task.request.is_eager:
            return None
        return task.request

    def _write_ending(self, task: Any, task_id: str, request: Any, outcome: str) -> None:
        self._write(task, request, task_id=task_id, finished_us=now_us(), outcome=outcome)

    def _write(
        self,
        task: Any,
        request: Any,
        *,
        task_id: str | None = None,
        started_us: int | None = None,
        finished_us: int | None = None,
        outcome: str | None = None,
        retry_due_us: int | None = None,
    ) -> None:
        get = request.get if request is not None else lambda _: None
        properties = get("properties") or {}
        has_waited = get(WAITED)
        line = (
            get("id") or task_id,
            task.name,
            get("root_id"),
            get("hostname") or self._worker,
            os.getpid(),
            # A task that never started has its queue in the properties, or only a routing key.
            get(QUEUE) or properties.get(QUEUE) or (get("delivery_info") or {}).get("routing_key"),
            get("retries"),
            as_text(due_us_or_none(get("eta"))),
            as_text(started_us),
            as_text(finished_us),
            outcome,
            as_text(retry_due_us),
            properties.get(WAITED) if has_waited is None else has_waited,
        )
        fields = dict(zip(FIELDS, line, strict=True))
        self._lines.append(finished_us or started_us or now_us(), _as_json(fields))


class DailyFiles:
    """Appends lines to one file per process and day. Thread-safe.

    No lock is used, because another thread could hold the lock during a fork. The operating system
    never mixes two writes to a file that is open for appending.
    """

    def __init__(self, folder: Path, name: str) -> None:
        self._folder = folder
        self._name = re.sub(r"[^\w.@-]", "_", name)
        self._open: tuple[int, int, AppendedFile] | None = None
        """The process id, the day (days since the epoch), and the open file."""
        self._warned = False

    def append(self, at_us: int, line: str) -> None:
        """Append a line to the file of the day. Logs only the first error."""
        data = line.encode() + b"\n"
        try:
            if self._file(at_us // DAY_US).write(data) < len(data):
                self.close()  # a reopened file begins with a line break
                raise OSError("only a part of a line was written")
        except OSError as exc:
            if not self._warned:
                self._warned = True
                logger.warning(
                    "native delay: telemetry is incomplete, cannot write to %s: %s",
                    self._folder,
                    exc,
                )

    def close(self) -> None:
        """Close the file. The next write opens the file again."""
        self._open = None

    def _file(self, day: int) -> AppendedFile:
        opened, pid = self._open, os.getpid()
        if opened is not None and opened[:2] == (pid, day):
            return opened[2]
        self._folder.mkdir(parents=True, exist_ok=True)
        date = str(as_text(day * DAY_US))[:10]
        file = AppendedFile(self._folder / f"{date}_{self._name}_{pid}.jsonl")
        self._open = (pid, day, file)
        return file


class AppendedFile:
    """A file open for appending; Python closes the file after the last use."""

    def __init__(self, path: Path) -> None:
        self._descriptor = -1
        self._descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        if os.fstat(self._descriptor).st_size:
            self.write(b"\n")  # the last line may be incomplete

    def write(self, data: bytes) -> int:
        return os.write(self._descriptor, data)

    def __del__(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)


def waited(message: Any, *, now_ms: int) -> bool | None:
    """Return True if a received message waited in the broker until its due time.

    False: a producer with this package sent the message after the due time. None: unknown.
    """
    headers = getattr(message, "headers", None) or {}
    # The strategy takes the ETA out of the headers while Celery makes its request.
    due_ms = due_ms_of({"eta": getattr(message, "kept_eta", None) or headers.get("eta")})
    wait: Any = getattr(message, "native_delay", _UNTOLD)
    if due_ms is None or wait is _UNTOLD:
        return None
    if wait is None:
        return False if due_ms <= now_ms else None
    return True if wait.due_us <= due_ms * 1000 else None


def outcome_of(state: str | None, retval: Any) -> str:
    """Convert a task's Celery state and return value (or exception) to telemetry's ``outcome``."""
    if state == states.REJECTED and getattr(retval, "requeue", False):
        return REQUEUED
    refused = getattr(retval, "exc", None)
    if state == states.RETRY and isinstance(refused, RetryAfter) and not refused.counts:
        return REQUEUED
    # A task that raised a BaseException has no state, and Celery takes its process for lost.
    return _OUTCOMES.get(state, LOST)


def retry_due_us(outcome: str, raised: Any, finished_us: int) -> int | None:
    """Return the due time (µs since the epoch) of a retried or requeued task, else None."""
    if outcome not in COMES_AGAIN:
        return None
    when = getattr(raised, "when", None)
    if isinstance(when, int | float):
        return finished_us + round(when * 1e6)
    return due_us_or_none(when) or finished_us


def now_us() -> int:
    return time_ns() // 1000


def as_text(us: int | None) -> str | None:
    """Format microseconds since the epoch as ISO 8601 in UTC: 2026-11-20T09:30:00.000000Z."""
    if us is None:
        return None
    return f"{moment(us).replace(tzinfo=None).isoformat(timespec='microseconds')}Z"

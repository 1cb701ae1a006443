"""The fields of telemetry: lines of JSON about the start and end of tasks.

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

from datetime import datetime, timedelta

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

_EPOCH = datetime(1970, 1, 1)  # UTC


def moment(us: int | None) -> str | None:
    """Format microseconds since the epoch as ISO 8601 in UTC: 2026-11-20T09:30:00.000000Z."""
    if us is None:
        return None
    return f"{(_EPOCH + timedelta(microseconds=us)).isoformat(timespec='microseconds')}Z"

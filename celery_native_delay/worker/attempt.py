"""The fields of a telemetry line. Workers write a line when a task starts, and when a task ends.

The process that runs a task writes two lines per attempt: at the start, with ``finished`` and
``outcome`` null, and at the end. The main process writes a line with ``started`` null for a task
that never started (revoked, expired), or whose process was killed or timed out.

``waited`` is true if the message waited in the broker until its due time, and false if a producer
with this package sent the message after its due time. ``waited`` is null if unknown: the task had
no due time, was put back, waited in a worker, or the broker does not say. Before Celery 5.7 other
fields may be null, too.
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
"""The task raised ``Ignore``, or replaced itself by another task with the same id."""
FAILURE = "failure"
RETRY = "retry"
REQUEUED = "requeued"
"""The task comes again with the same number of retries: it raised ``RetryAfter``, or rejected its
message with requeue."""
REJECTED = "rejected"
LOST = "lost"
"""The task's process died."""
TIMEOUT = "timeout"
REVOKED = "revoked"
EXPIRED = "expired"
TERMINATED = "terminated"

DONE = (SUCCESS, IGNORED)
GIVEN_UP = (FAILURE, REJECTED, LOST, TIMEOUT, REVOKED, EXPIRED, TERMINATED)
COMES_AGAIN = (RETRY, REQUEUED)
RAN_TO_ITS_END = (SUCCESS, FAILURE, RETRY, REJECTED)
"""A message was delivered twice if one number of retries has two attempts with such outcomes."""

_EPOCH = datetime(1970, 1, 1)  # UTC


def moment(us: int | None) -> str | None:
    """Format microseconds since the epoch as ISO 8601 in UTC: 2026-11-20T09:30:00.000000Z."""
    if us is None:
        return None
    return f"{(_EPOCH + timedelta(microseconds=us)).isoformat(timespec='microseconds')}Z"

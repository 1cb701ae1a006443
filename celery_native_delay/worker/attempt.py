"""The words of telemetry about an attempt to run a task, which its writer and reader share.

An attempt is written down twice: when it starts, with ``finished`` and ``outcome`` null, and
when it ends. Of what never started (revoked, expired), and of what ended without a word of its
own (its process was killed, its time limit passed), the worker's main process writes a line with
``started`` null, for a time limit perhaps two, beside a ``lost`` of the process itself if it had
the time. ``waited`` says whether its message waited in the broker until it was due; if it did not,
it was sent after that, by an installed producer. It is null where that is not known: no due time,
put back since, held by the worker, a broker that does not say. Where Celery does not tell it more
than the id, as before 5.7, other fields are null.
"""

from __future__ import annotations

from datetime import datetime, timedelta

#: The fields of a line, in order, with their types in Spark SQL.
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

#: By these the lines of one attempt are known, also when a line is there several times.
ATTEMPT_KEY = ("id", "retries", "started", "worker", "pid")

SUCCESS = "success"
IGNORED = "ignored"
"""It raised ``Ignore``, or was replaced by another task, which runs under the same id."""
FAILURE = "failure"
RETRY = "retry"
REQUEUED = "requeued"
"""It rejected its message, to be delivered again."""
REJECTED = "rejected"
LOST = "lost"
"""Its process died."""
TIMEOUT = "timeout"
REVOKED = "revoked"
EXPIRED = "expired"
TERMINATED = "terminated"

DONE = (SUCCESS, IGNORED)
GIVEN_UP = (FAILURE, REJECTED, LOST, TIMEOUT, REVOKED, EXPIRED, TERMINATED)
COMES_AGAIN = (RETRY, REQUEUED)
RAN_TO_ITS_END = (SUCCESS, FAILURE, RETRY, REJECTED)
"""Twice one of these under one number of retries: the message was there twice."""

_EPOCH = datetime(1970, 1, 1)  # UTC, as all of these moments


def moment(us: int | None) -> str | None:
    """Microseconds since the epoch as ISO 8601 in UTC: 2026-11-20T09:30:00.000000Z."""
    if us is None:
        return None
    return f"{(_EPOCH + timedelta(microseconds=us)).isoformat(timespec='microseconds')}Z"

"""A note between the tasks of one job on an executor: its broker was waited for in vain.

Python workers of one executor share a folder, which Spark removes; a task that fails takes its
process with it, so memory would not do.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from uuid import uuid4

from pyspark import SparkFiles


class GivenUp:
    """Reason why the job *job_id* sends nothing more from this executor, as soon as one task knows.

    With an empty *job_id* no other task is told. Where the folder cannot be written to, each
    task finds out by itself.
    """

    def __init__(self, job_id: str) -> None:
        name = f"celery-native-delay-{job_id}.given-up"
        self._path = Path(SparkFiles.getRootDirectory(), name) if job_id else None

    def reason(self) -> str:
        """The reason that a task has noted; "" if the broker may be there."""
        if self._path is not None:
            with suppress(OSError):
                return self._path.read_text()
        return ""

    def say(self, reason: str) -> None:
        """Note the reason, for the tasks that begin from now on."""
        if self._path is None:
            return
        with suppress(OSError):
            whole = self._path.with_suffix(f".{uuid4().hex}")
            whole.write_text(reason)
            whole.replace(self._path)

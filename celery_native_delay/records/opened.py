"""Opens the Redis or database that keeps the state about waiting tasks."""

from __future__ import annotations

import atexit
from typing import Any, NamedTuple

from ..errors import UnsupportedBroker
from ..per_process import PerProcess
from ..urls import is_redis_url


class RecordsLocation(NamedTuple):
    """The URL of a Redis or database, and the app's namespace there (*owner*)."""

    url: str
    owner: str


#: Records of the parent process after a fork. The child keeps these objects, because freeing the
#: objects would close the parent's connections.
_inherited: list[Any] = []

_records: PerProcess[tuple[str, str], Any] = PerProcess(_inherited.append)


def records_at(url: str, owner: str) -> Any:
    """Make a client of the Redis or database that stores the state about waiting tasks."""
    if is_redis_url(url):
        try:
            from .redis import RedisRecords
        except ImportError as exc:
            raise UnsupportedBroker(
                "records in Redis need redis-py: pip install 'celery_native_delay[redis]'"
            ) from exc
        return RedisRecords(url, owner)
    try:
        from .sql import SqlRecords
    except ImportError as exc:
        raise UnsupportedBroker(
            "records in a database need SQLAlchemy 2: pip install 'celery_native_delay[sql]'"
        ) from exc
    return SqlRecords(url, owner)


def records_of_process(url: str, owner: str) -> Any:
    """Return this process's client of the Redis or database at *url*."""
    return _records.get((url, owner), lambda: records_at(url, owner))


@atexit.register
def flush() -> None:
    """Wait for unfinished writes, up to 0.3 s per Redis or database."""
    for found in _records.values():
        found.flush()

"""Opens the records at a URL. No connection is made before the first use."""

from __future__ import annotations

import atexit
from typing import Any, NamedTuple

from ..errors import UnsupportedBroker
from ..per_process import PerProcess
from ..urls import is_redis_url


class Place(NamedTuple):
    """The place of records: the *url* of a Redis or a database, and their *owner* there.

    The owner is a namespace: several apps may share one Redis or database.
    """

    url: str
    owner: str


#: Records of the parent process after a fork. They are kept here, because freeing them in the child
#: would close the parent's connections.
_inherited: list[Any] = []

_records: PerProcess[tuple[str, str], Any] = PerProcess(_inherited.append)


def records_at(url: str, owner: str) -> Any:
    """Open the records of *owner* at *url*, the URL of a Redis or a SQLAlchemy URL."""
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
    """The records of *owner* at *url*, opened once per process."""
    return _records.get((url, owner), lambda: records_at(url, owner))


@atexit.register
def flush() -> None:
    """Wait up to 0.3 s until everything this process added to an index is stored."""
    for found in _records.values():
        found.flush()

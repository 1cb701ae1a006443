"""The records that a URL names. Nothing is asked of them before they are used."""

from __future__ import annotations

import atexit
from typing import Any, NamedTuple

from ..errors import UnsupportedBroker
from ..per_process import PerProcess
from ..urls import is_redis_url


class Place(NamedTuple):
    """A place of records: the *url* of a Redis or a database, and whose they are there."""

    url: str
    owner: str


#: Of a parent process: a child must not close their connections, as forgetting them would.
_inherited: list[Any] = []

_records: PerProcess[tuple[str, str], Any] = PerProcess(_inherited.append)


def records_at(url: str, owner: str) -> Any:
    """New records of *owner* at *url*, a Redis' or one of SQLAlchemy's."""
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
    """The records of *owner* at *url*, which this process shares."""
    return _records.get((url, owner), lambda: records_at(url, owner))


@atexit.register
def flush() -> None:
    """Wait, for a moment, until what this process noted is there."""
    for found in _records.values():
        found.flush()

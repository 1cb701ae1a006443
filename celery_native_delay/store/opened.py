"""Opens the store that ``native_delay_store`` names, once per process."""

from __future__ import annotations

import logging
from contextlib import suppress
from pathlib import Path

from ..errors import UnsupportedBroker
from ..per_process import PerProcess
from ..settings import DelaySettings
from ..texts import digest_of
from ..urls import is_redis_url
from .interface import Store, at_place

logger = logging.getLogger(__name__)

#: Stores of the parent process after a fork. The child keeps these objects, because freeing the
#: objects would close the parent's connections.
_inherited: list[Store] = []

_stores: PerProcess[tuple[str, str], Store] = PerProcess(_inherited.append)

#: The longest namespace that fits into the tables, and how much of a longer one is kept beside its
#: digest.
_LONGEST_NAMESPACE, _KEPT = 64, 31


def store_of(settings: DelaySettings, place: str = "", *, url: str | None = None) -> Store:
    """Return this process's store of one app.

    *place* is the broker's virtual host: the tasks of each wait apart. *url* is the database of a
    broker that is its own store; by default ``native_delay_store`` names the store.

    Raises:
        UnsupportedBroker: the Python package for this kind of store is not installed.
    """
    address = url or settings.store
    assert address is not None
    namespace = at_place(settings.namespace, place)
    if len(namespace) > _LONGEST_NAMESPACE:
        namespace = at_place(settings.namespace[:_KEPT], digest_of(namespace))
    seconds, joins = settings.store_timeout_seconds, settings.store_transactions
    return _stores.get(
        (address, namespace),
        lambda: store_at(address, namespace, timeout_seconds=seconds, joins=joins),
    )


def load(settings: DelaySettings) -> None:
    """Import what the store needs, so that the first delayed publish does not wait for it."""
    with suppress(ImportError):  # the first delayed publish raises it
        if settings.store is None:
            return
        if is_redis_url(settings.store):
            from . import redis  # noqa: F401
        else:
            from . import sql  # noqa: F401


def forget_store(url: str, namespace: str) -> None:
    """Close this process's connections to the store at *url*."""
    store = _stores.forget((url, namespace))
    if store is not None:
        store.close()


def store_at(url: str, namespace: str, *, timeout_seconds: float, joins: bool = True) -> Store:
    """Make a client of the store at *url*. Nothing is connected yet.

    *joins*: True if a store in Django's database joins the transactions of its user.
    """
    if url.partition(":")[0] == "django":
        try:
            from .django import DjangoStore
        except ImportError as exc:
            raise UnsupportedBroker(
                f"native_delay_store={url!r} needs Django, and SQLAlchemy 2 beside it: pip install "
                f"'celery_native_delay[sql]' ({exc})"
            ) from exc
        return DjangoStore(url, namespace, timeout_seconds=timeout_seconds, joins=joins)
    if is_redis_url(url):
        try:
            from .redis import RedisStore
        except ImportError as exc:
            raise UnsupportedBroker(
                f"a store in Redis needs redis-py: pip install 'celery_native_delay[redis]' ({exc})"
            ) from exc
        return RedisStore(url, namespace, timeout_seconds=timeout_seconds)
    try:
        from .sql import SqlStore
    except ImportError as exc:
        raise UnsupportedBroker(
            f"a store in a database needs SQLAlchemy 2: pip install 'celery_native_delay[sql]' "
            f"({exc})"
        ) from exc
    store = SqlStore(url, namespace, timeout_seconds=timeout_seconds)
    path = (store.engine.url.database or "").removeprefix("file:")
    if store.is_file and not Path(path).is_absolute():
        logger.warning(
            "native delay: %s is another file for each folder that a process starts in: name it "
            "with four slashes, as in sqlite:////var/lib/shop/delays.db",
            store.where,
        )
    return store

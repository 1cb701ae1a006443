"""Sends an app's tasks with a transaction of the user."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

from celery._state import get_current_task
from celery.exceptions import Ignore

from ..durations import DAY_US
from ..errors import CannotDelay
from ..records.interface import RecordName
from ..settings import DelaySettings
from ..store import joined
from ..store.interface import Store
from ..texts import storable
from .broker import bounded, unconnected
from .installation import delaying_channel, installation_of, is_in_clock


@contextmanager
def in_transaction(app: Any, session: Any, *, once: bool = False) -> Iterator[None]:
    """Send the tasks of a ``with`` block if, and only if, a transaction of SQLAlchemy commits.

    Delayed tasks wait in the store. After the commit, this process publishes immediate ones; if it
    dies before, a worker does so within seconds. With a rollback, also of a savepoint, nothing was
    sent. Only tasks that this thread (or asyncio task) sends belong to the transaction.

    Args:
        app: a Celery app whose ``native_delay_store`` is this database.
        session: a ``Session`` or ``Connection`` of SQLAlchemy 2, or an ``AsyncSession``. The
            process publishes the immediate tasks of a Connection if the Connection has committed
            in the block; a worker publishes the others.
        once: True in a task, whose message may come twice: the transaction also claims the task's
            id and retry number. If an earlier delivery has committed this claim, Celery's
            ``Ignore`` ends the task.

    Raises:
        NoStore: the app has no store, or its store is in Redis.
        CannotDelay: *session* commits each statement by itself, its transaction has failed, or it
            is connected to another database than the store.
        StoreUnavailable: the store's tables are missing, and cannot be created.

    Example:
        >>> with Session(engine) as session, in_transaction(app, session):
        ...     session.add(order)
        ...     remind.apply_async((order.id,), countdown=3 * 86400)
        ...     session.commit()
    """
    store = store_of_app(app)
    with nullcontext() if is_in_clock(app) else store.joining(session):
        if once:
            claim(app, store, get_current_task())
        yield


def store_of_app(app: Any) -> Store:
    """Return the store of an app. Raises NoStore."""
    alone = unconnected(app)
    with nullcontext(alone) if alone is not None else bounded(app) as connection:
        channel, _ = delaying_channel(app, connection)
        store: Store = channel.needed_store
    return store


def claims(task: Any) -> bool:
    """Return True if the task is ``once="transaction"``."""
    return getattr(task, "once", False) == "transaction"


def claim(app: Any, store: Store, task: Any) -> None:
    """Claim the id and retry number of a running task. A task that is called directly has none.

    Raises Celery's Ignore if they were claimed before, and CannotDelay if *task* is None.
    """
    if task is None:
        raise CannotDelay("expected in_transaction(…, once=True) in a task that runs")
    installation, request = installation_of(app), task.request
    if request.called_directly or request.is_eager:
        return
    settings = DelaySettings() if installation is None else installation.settings()
    one = f"{task.name}:{request.id}:{request.retries}"
    if nesting := request.get("replaced_task_nesting"):  # its replacement has the same id
        one += f":{nesting}"
    name = RecordName("claim", storable(one))
    state: Any = store.state  # of a database, where a transaction is
    if not state.claim(name, kept_us=round(settings.once_days(task.name) * DAY_US)):
        raise Ignore("the task has run already, and it is once")


def teach_transactions(app: Any, task: Any) -> None:
    """Let ``delay_on_commit`` and ``apply_async_on_commit`` join the transaction, not ``replace``.

    Else they send after the commit, and the task is lost if the process dies before. ``replace``
    ends the task by an exception, which rolls a transaction of its body back.
    """
    task.replace = partial(_replace, task, task.replace)
    for name in ("delay", "apply_async"):
        later = getattr(task, f"{name}_on_commit", None)
        if getattr(later, "__module__", None) == "celery.contrib.django.task":  # not the user's own
            setattr(task, f"{name}_on_commit", partial(_on_commit, app, getattr(task, name), later))


def _on_commit(app: Any, send: Callable[..., Any], later: Any, *args: Any, **kwargs: Any) -> None:
    installation = installation_of(app)
    keeps_rows = installation is not None and installation.enabled and installation.has("store")
    if keeps_rows and not is_in_clock(app) and store_of_app(app).users() is not None:
        send(*args, **kwargs)
    else:
        later(*args, **kwargs)


def _replace(task: Any, replace: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    # The transaction of a task that is once="transaction" commits with the replacement.
    with nullcontext() if claims(task) else joined.outside_transaction():
        return replace(*args, **kwargs)


@contextmanager
def outside_transaction(app: Any) -> Iterator[None]:
    """Send the tasks of a ``with`` block at once, although a transaction is open.

    *app* is the Celery app. A rollback of the transaction does not undo these tasks.
    """
    with joined.outside_transaction():
        yield

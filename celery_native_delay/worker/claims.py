"""Runs a task that is ``once="transaction"`` in one transaction with its claim and its sends."""

from __future__ import annotations

from contextlib import nullcontext
from functools import wraps
from typing import Any

from ..app.installation import is_in_clock
from ..app.transactions import claim, store_of_app
from ..errors import NoStore
from ..per_process import PerProcess
from ..store.interface import Store

#: By app.
_stores: PerProcess[Any, Store] = PerProcess()


def claims(task: Any) -> bool:
    """Return True if the task is ``once="transaction"``."""
    return getattr(task, "once", False) == "transaction"


def check_claims(app: Any, store: Store) -> None:
    """Raise NoStore if the store cannot hold the transaction of a task, except in a test clock."""
    if not store.has_one_transaction and not is_in_clock(app):
        raise NoStore(
            f'expected native_delay_store="django" for tasks that are once="transaction", got '
            f"{store.where}: set it, or use in_transaction(app, session, once=True) in the task"
        )


def let_claim(app: Any) -> None:
    """Wrap the tasks of an app that are ``once="transaction"``, before the pool forks."""
    for task in app.tasks.values():
        if claims(task) and not hasattr(task.run, "native_delay_claims"):
            task.run = _in_one_transaction(app, task)


def _in_one_transaction(app: Any, task: Any) -> Any:
    body = task.run

    @wraps(body)
    def run(*args: Any, **kwargs: Any) -> Any:
        if task.request.called_directly or task.request.is_eager:
            return body(*args, **kwargs)
        in_clock = is_in_clock(app)
        store = store_of_app(app) if in_clock else _stores.get(app, lambda: store_of_app(app))
        with nullcontext() if in_clock else store.one_transaction():
            claim(app, store, task)
            return body(*args, **kwargs)

    run.native_delay_claims = True  # type: ignore[attr-defined]
    return run

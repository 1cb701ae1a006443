"""Runs a task that is ``once`` a single time, however often its message is delivered.

Before the task runs, its worker claims the task's id and retry number in the store. After a success
the claim stays for days, and further deliveries are acknowledged and not run. If the worker dies,
its claim ends with its lease, and the next delivery runs.

A task that is ``once="transaction"`` runs in one transaction with its claim and its sends.
"""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial, wraps
from typing import Any

from celery import signals, states
from celery.exceptions import Ignore
from celery.worker import state as worker_state

from ..app.installation import installation_of, is_in_clock
from ..app.transactions import claim, claims, store_of_app
from ..durations import DAY_US
from ..errors import NoStore
from ..keyed import rules
from ..keyed.record import name_of_once
from ..message import ONCE
from ..per_process import PerProcess
from ..settings import DelaySettings
from ..store.interface import Store
from .arrival import Arrival, AskAgain, Drop, Ruling, WaitUntil
from .in_time import StoreGate
from .leases import Held, leases_of
from .unique import PAUSE_SECONDS, give_back, is_here


class Once(StoreGate):
    """A check before a task runs: drop it if it has run, wait if it is running."""

    waits = "tasks that are once wait"

    def __init__(self, app: Any, settings: DelaySettings) -> None:
        self._app = app
        self._settings = settings

    def __call__(self, arrival: Arrival) -> Ruling | None:
        if not arrival.has_headers:
            return None
        if not arrival.fields.get(ONCE) and not self.concerns(arrival.name):
            return None
        if arrival.id in worker_state.revoked:
            return None
        name = name_of_once(arrival.name, arrival.id, arrival.fields.get("retries"))
        here = partial(is_here, arrival)
        leases = leases_of(self._app)
        try:
            token, step = leases.begin_in_time(name, arrival.id, here, rules.claim_once)
        except Exception as exc:
            return self.unanswered(arrival, exc)
        self.answered()
        if step.stands is not None:
            return Drop("it has run already, and it is once")
        if step.free_us is not None:
            return WaitUntil(step.free_us, otherwise=AskAgain(PAUSE_SECONDS))
        arrival.message.headers[ONCE] = token
        return None

    def concerns(self, task: str) -> bool:
        """Return True if each task of this name is ``once``, by a setting or its decorator."""
        by_decorator = getattr(self._app.tasks.get(task), "once", False) is True
        return by_decorator or self._settings.is_once(task)


def free_taken(arrival: Arrival) -> None:
    """Free the locks and the claim of a received task that does not run now."""
    headers = arrival.message.headers
    give_back(arrival.consumer, headers)
    token = headers.get(ONCE)
    if isinstance(token, str):
        headers[ONCE] = True  # its next delivery is once, too
        name = name_of_once(arrival.name, arrival.id, arrival.fields.get("retries"))
        rule = partial(rules.end, token=token)
        leases_of(arrival.consumer.app).settle_in_time(name, rule, token=token)


def _claim_of(task: Any) -> tuple[str, str] | None:
    """Return the name and the token of a running task's claim; None without a claim."""
    request = task.request
    token = vars(request).get(ONCE)
    if not isinstance(token, str) or request.is_eager or installation_of(task.app) is None:
        return None
    return name_of_once(task.name, request.id, request.retries), token


@signals.task_prerun.connect(weak=False)  # type: ignore[untyped-decorator]
def renew(sender: Any = None, **_: Any) -> None:
    """Renew the claim while the task runs."""
    if (claim := _claim_of(sender)) is not None:
        name, token = claim
        leases_of(sender.app).hold(Held(name, sender.request.id, lambda: True, token, runs=True))


@signals.task_postrun.connect(weak=False)  # type: ignore[untyped-decorator]
def settle(sender: Any = None, state: Any = None, **_: Any) -> None:
    """Keep the claim of a task that succeeded; free the claim of any other."""
    claim = _claim_of(sender)
    installation = None if claim is None else installation_of(sender.app)
    if claim is None or installation is None:
        return
    name, token = claim
    rule = partial(rules.end, token=token)
    if state == states.SUCCESS:
        kept_us = round(installation.settings().once_days(sender.name) * DAY_US)
        rule = partial(rules.ran_once, task_id=sender.request.id, kept_us=kept_us)
    leases_of(sender.app).settle(name, rule, token=token)


# ---- in a transaction ----------------------------------------------------------------------------

#: By app.
_stores: PerProcess[Any, Store] = PerProcess()


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
            try:
                return body(*args, **kwargs)
            except Ignore as exc:  # of ``replace``, or of the user: the task has ended
                ended = exc
        raise ended

    run.native_delay_claims = True  # type: ignore[attr-defined]
    return run

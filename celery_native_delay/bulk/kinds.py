"""Reusable encoded messages for ``bulk(app)``: one per kind of task (name, route and options).

``bulk(app)`` keeps the first encoded message of a kind. Later messages are copies with another task
id, due time and arguments. Before the first copy, ``bulk`` makes two checks: a second message from
``apply_async`` differs only in these values, and no other code sees or changes the messages.
``bulk`` repeats both checks after a reconnect, and once a minute.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from celery import Task, signals
from celery._state import _task_stack, get_current_worker_task
from celery.app.routes import MapRoute
from kombu import Producer

from ..app.installation import Installation
from ..due_time import due_us as due_us_of
from ..errors import InvalidDueTime
from ..message import HEADER, TENANT
from ..now import time_ns
from ..transports.bulk_publisher import BulkPublisher, TaskTemplate, TaskValues

logger = logging.getLogger("celery_native_delay.bulk")

_PUBLISH_SIGNALS = (signals.before_task_publish, signals.after_task_publish, signals.task_sent)


class Made(NamedTuple):
    """A task's id, due time and arguments, for a copy that is sent at the time *at_us*."""

    at_us: int
    due_us: int
    values: TaskValues


@dataclass(slots=True)
class Kind:
    """Tasks with the same name, route and options, and their reusable encoded message."""

    learnt: TaskTemplate
    #: The batch's number of connects at the first message. A reconnect makes the message invalid.
    connects: int
    #: If not None, only tasks with these encoded arguments can use the message.
    body: bytes | None
    #: True if a second message differed only in id, due time and arguments.
    checked: bool = False

    def serves(self, made: Made, connects: int) -> bool:
        """Return True if the task can be sent as a copy of this kind's encoded message.

        *connects* is the batch's number of connects. A reconnect makes the encoded message invalid.
        """
        known = self.checked and (self.body is None or self.body == made.values[-1])
        return known and self.connects == connects


class Sample(NamedTuple):
    """A task that ``apply_async`` has just published."""

    #: The task (or its name), and the options of ``send``.
    key: Any
    #: The task if the app has registered it.
    known: Task | None
    task_id: str
    by_countdown: bool
    made: Made | None


class Kinds:
    """The message templates of a batch: one per task name, route and options."""

    def __init__(
        self, installation: Installation, publisher: BulkPublisher, iso: Callable[[int], str]
    ) -> None:
        self._installation = installation
        self._publisher = publisher
        self._iso = iso
        self._kinds: dict[Any, Kind] = {}
        #: Keys of kinds whose messages other code sees or changes, or differ for another reason.
        self._without_template: set[Any] = set()
        self._logged: set[str] = set()

    def may_copy(self, key: Any) -> bool:
        """Return True if a task of the kind *key* (name, route and options) may be a copy now."""
        hook = hook_now()
        if hook:
            self._log(logging.INFO, hook)
        return not hook and key not in self._without_template

    def of(self, key: Any) -> Kind | None:
        """Return the template of tasks of the kind *key*, or None."""
        return self._kinds.get(key)

    def learn(self, sample: Sample) -> None:
        """Store a published task's message as a template, or check the stored template with it."""
        key, now_us = sample.key, time_ns() // 1000
        kind = self._kinds.get(key)
        connects = self._publisher.outbox.connects
        if kind is None or kind.connects != connects or now_us > kind.learnt.valid_until_us:
            self._begin(sample, kind, now_us)
        elif sample.made is not None and not (kind.checked and kind.body is None):
            alike = self._made_by(kind, sample, now_us)
            if alike is False:
                self._without_template.add(key)
                name = (self._publisher.last_headers or {}).get("task")
                self._log(logging.WARNING, f"two tasks {name!r} differ unexpectedly")
            elif alike:
                kind.checked = True
                if sample.made.values[-1] != kind.body:
                    kind.body = None

    def _begin(self, sample: Sample, before: Kind | None, now_us: int) -> None:
        """Store the last published message for reuse, unless other code sees the messages."""
        hook, headers = (
            hook_of(self._installation, sample.known),
            self._publisher.last_headers or {},
        )
        if TENANT in headers:
            hook = "each of its messages names a tenant"
        if self._installation.declared_key(str(headers.get("task")), sample.known) is not None:
            hook = "a key is declared for the task"
        if hook:
            self._without_template.add(sample.key)
            self._log(logging.INFO, hook)
            return
        learnt = self._publisher.learn() if headers.get("id") == sample.task_id else None
        if learnt is None:
            return
        kind = Kind(learnt, self._publisher.outbox.connects, learnt.body)
        # If the earlier message gives the same bytes, no second task has to be compared.
        if before is not None and before.checked and self._made_by(before, sample, now_us):
            kind.checked, kind.body = True, before.body
        self._kinds[sample.key] = kind

    def _made_by(self, kind: Kind, sample: Sample, now_us: int) -> bool | None:
        """Return True if a copy for *kind* equals the published message; None if not comparable."""
        if sample.made is None:
            return None
        headers = self._publisher.last_headers
        at_us, due_us, values = sample.made
        if headers is not None and HEADER not in headers:
            return False if due_us > now_us else None
        if sample.by_countdown and headers is not None:
            try:
                their_due_us = due_us_of(headers["eta"])
            except (InvalidDueTime, KeyError):
                return False
            if not due_us - 1 <= their_due_us <= due_us + now_us - at_us + 1:
                return False
            values = (values[0], self._iso(their_due_us), *values[2:])
        return self._publisher.made_by(kind.learnt, values)

    def _log(self, level: int, why: str) -> None:
        if why not in self._logged:
            self._logged.add(why)
            logger.log(level, "sending by apply_async, not by template: %s", why)


def hook_now() -> str:
    """Return what sees or changes each publish at this moment, or "" if nothing does."""
    if any(signal.receivers for signal in _PUBLISH_SIGNALS):
        return "a signal of publishing has receivers"
    within_task = _task_stack.stack and get_current_worker_task() is not None
    return "the running task is the parent of what it sends" if within_task else ""


def hook_of(installation: Installation, task: Task | None) -> str:
    """Return what sees or changes each publish of *task* in this app, or "" if nothing does."""
    app, amqp = installation.app, installation.app.amqp
    functions = [type(app).send_task, app.send_task, installation.earlier_send_task]
    functions += [amqp.create_task_message, amqp.send_task_message]
    functions += [Producer.publish, Producer._publish]
    if task is not None:
        functions += [task.apply_async, task.shadow_name]
    for function in filter(None, functions):
        module = getattr(function, "__module__", None) or ""
        name = f"{module}.{getattr(function, '__qualname__', function)}"
        if hasattr(function, "__wrapped__"):
            return f"{name} is wrapped by other code"
        if module.partition(".")[0] not in ("celery", "kombu", "celery_native_delay"):
            return f"{name} stands for a method of Celery or kombu"
    if any(type(route) is not MapRoute for route in amqp.router.routes):
        return "a router of task_routes is a function or class of your own"
    if task is not None and task.app is not app:
        return "the task belongs to another app"
    settings = [name for name in ("task_compression", "task_send_sent_event") if app.conf[name]]
    serializer = getattr(task, "serializer", None) or app.conf.task_serializer
    settings += [] if serializer == "json" else [f"the serializer {serializer}"]
    return " and ".join(settings)

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

from celery import Task

from ..due_time import due_us as due_us_of
from ..errors import InvalidDueTime
from ..message import HEADER
from ..now import time_ns
from ..transports.bulk_publisher import BulkPublisher, TaskTemplate, TaskValues
from .plain_publishing import PlainPublishing, same

logger = logging.getLogger("celery_native_delay.bulk")


class Made(NamedTuple):
    """A task's id, due time and arguments, for a copy that is sent at the time *at_us*."""

    at_us: int
    due_us: int
    values: TaskValues


@dataclass(slots=True)
class Kind:
    """Tasks with the same name, route and options, and their reusable encoded message."""

    learnt: TaskTemplate
    #: The result of :meth:`.PlainPublishing.hooks` for the first message.
    hooks: tuple[Any, ...]
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
    hooks: tuple[Any, ...]
    task_id: str
    by_countdown: bool
    made: Made | None


class Kinds:
    """The message templates of a batch: one per task name, route and options."""

    def __init__(
        self, plain: PlainPublishing, publisher: BulkPublisher, iso: Callable[[int], str]
    ) -> None:
        self._plain = plain
        self._publisher = publisher
        self._iso = iso
        self._kinds: dict[Any, Kind] = {}
        #: Keys of kinds for which a copy differed from the message of ``apply_async``.
        self._without_template: set[Any] = set()
        #: For each kind whose messages other code sees or changes: the publishing functions.
        self._observed: dict[Any, tuple[Any, ...]] = {}
        self._logged: set[str] = set()

    def hooks(self, key: Any, known: Task | None) -> tuple[Any, ...]:
        """Return the functions that publish tasks of the kind *key*; () if no copies may be sent.

        *known* is the task, or None if the app has not registered the task.
        """
        return () if key in self._without_template else self._plain.hooks(known)

    def of(self, key: Any, hooks: tuple[Any, ...]) -> Kind | None:
        """Return the stored template for tasks with this *key* (name, route and options), or None.

        *hooks* are the functions that now publish the task. If other functions published the
        template's message, the result is None, too.
        """
        kind = self._kinds.get(key)
        return kind if kind is not None and same(kind.hooks, hooks) else None

    def learn(self, sample: Sample) -> None:
        """Store a published task's message as a template, or check the stored template with it."""
        key, now_us = sample.key, time_ns() // 1000
        kind = self.of(key, sample.hooks)
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
        key, hooks = sample.key, sample.hooks
        if same(self._observed.get(key, ()), hooks):
            return
        witness = self._plain.witness(sample.known)
        if witness:
            self._observed[key] = hooks
            self._log(logging.INFO, witness)
            return
        headers = self._publisher.last_headers or {}
        learnt = self._publisher.learn() if headers.get("id") == sample.task_id else None
        if learnt is None:
            return
        kind = Kind(learnt, hooks, self._publisher.outbox.connects, learnt.body)
        # If the earlier message gives the same bytes, no second task has to be compared.
        if before is not None and before.checked and self._made_by(before, sample, now_us):
            kind.checked, kind.body = True, before.body
        self._kinds[key] = kind

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

"""Kinds of tasks that may go by template: of each, what two that went the long way have taught.

A template is made of the first. It serves when it is proved that no code sees those after it, and
when it makes the second as well, which had other arguments. After a reconnect, and once a minute,
one message has to show that both still hold.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from time import time_ns
from typing import Any, NamedTuple

from celery import Task

from ..due_time import due_us as due_us_of
from ..errors import InvalidDueTime
from ..message import HEADER
from ..transports.bulk_publisher import BulkPublisher, TaskTemplate, TaskValues
from .plain_publishing import PlainPublishing, same

logger = logging.getLogger("celery_native_delay.bulk")


class Made(NamedTuple):
    """Values in which two tasks of one kind differ; made *at_us*."""

    at_us: int
    due_us: int
    values: TaskValues


@dataclass(slots=True)
class Kind:
    """Tasks of one name with the same options, and what the publisher has *learnt* of them.

    Valid on one connection, while *hooks* are what they were. Once *checked*, it serves for the
    arguments in *body*, and for all once that is None.
    """

    learnt: TaskTemplate
    hooks: tuple[Any, ...]
    generation: int
    body: bytes | None
    checked: bool = False

    def serves(self, made: Made, generation: int) -> bool:
        """True if its template, on this connection, has been seen to make the like of *made*."""
        known = self.checked and (self.body is None or self.body == made.values[-1])
        return known and self.generation == generation


class Sample(NamedTuple):
    """A task that has just gone the long way.

    *made* is what a template would have been filled with, just before; None if nothing.
    """

    key: Any
    known: Task | None
    hooks: tuple[Any, ...]
    task_id: str
    by_countdown: bool
    made: Made | None


class Kinds:
    """All kinds of tasks of one batch; keys are the caller's."""

    def __init__(
        self, plain: PlainPublishing, publisher: BulkPublisher, iso: Callable[[int], str]
    ) -> None:
        self._plain = plain
        self._publisher = publisher
        self._iso = iso
        self._kinds: dict[Any, Kind] = {}
        #: Kinds for which a template does not do.
        self._unlike: set[Any] = set()
        #: Hooks of kinds of which something was found to see the tasks.
        self._witnessed: dict[Any, tuple[Any, ...]] = {}
        self._said: set[str] = set()

    def hooks(self, key: Any, known: Task | None) -> tuple[Any, ...]:
        """Hooks of a task's kind (:class:`PlainPublishing`); none for one without a template."""
        return () if key in self._unlike else self._plain.hooks(known)

    def of(self, key: Any, hooks: tuple[Any, ...]) -> Kind | None:
        """The kind known by *key*, if none of its hooks has been replaced since."""
        kind = self._kinds.get(key)
        return kind if kind is not None and same(kind.hooks, hooks) else None

    def learn(self, sample: Sample) -> None:
        """Find out from a task whether others of its kind need not go the long way."""
        key, now_us = sample.key, time_ns() // 1000
        kind = self.of(key, sample.hooks)
        generation = self._publisher.outbox.connects
        if kind is None or kind.generation != generation or now_us > kind.learnt.valid_until_us:
            self._begin(sample, kind, now_us)
        elif sample.made is not None and not (kind.checked and kind.body is None):
            alike = self._made_by(kind, sample, now_us)
            if alike is False:
                self._unlike.add(key)
                name = (self._publisher.last_headers or {}).get("task")
                self._say(logging.WARNING, f"two tasks {name!r} differ unexpectedly")
            elif alike:
                kind.checked = True
                if sample.made.values[-1] != kind.body:
                    kind.body = None

    def _begin(self, sample: Sample, before: Kind | None, now_us: int) -> None:
        """Make a template of the last message, unless something sees others of its kind.

        If the one *before* would have made it, what is known of that holds for the new one.
        """
        key, hooks = sample.key, sample.hooks
        if same(self._witnessed.get(key, ()), hooks):
            return
        witness = self._plain.witness(sample.known)
        if witness:
            self._witnessed[key] = hooks
            self._say(logging.INFO, witness)
            return
        headers = self._publisher.last_headers or {}
        learnt = self._publisher.learn() if headers.get("id") == sample.task_id else None
        if learnt is None:
            return
        kind = Kind(learnt, hooks, self._publisher.outbox.connects, learnt.body)
        if before is not None and before.checked and self._made_by(before, sample, now_us):
            kind.checked, kind.body = True, before.body
        self._kinds[key] = kind

    def _made_by(self, kind: Kind, sample: Sample, now_us: int) -> bool | None:
        """True if the template would have made the last message.

        None if that cannot be told: it was due already, or could not have gone by template.
        """
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

    def _say(self, level: int, why: str) -> None:
        """Log once in a batch why tasks do not go by template."""
        if why not in self._said:
            self._said.add(why)
            logger.log(level, "sending as apply_async does, not by template: %s", why)

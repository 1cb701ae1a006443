"""A task message that reached a worker, and the rulings that a gate may give about it.

Gates read the one and give the other; neither has anything to do with sockets or threads.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeAlias

from celery.worker import state

from ..due_time import due_us_or_none
from ..message import Delayed

#: How much too early a message that waited may arrive and still count as due, in microseconds:
#: the clocks of producer and worker differ.
CLOCK_SKEW_US = 1_000_000

#: A shorter wait, in microseconds, is left to Celery's timer: exact, and over before a message
#: has gone to the broker and back.
SHORTEST_WAIT_US = 100_000

#: For so long a task waits again while records that decide about it are away, in microseconds.
AWAY_US = 5_000_000


@dataclass(eq=False)
class Arrival:
    """A task message as it comes to the gates at *now_us*, microseconds since the epoch.

    *fields* are its headers, or its payload in task protocol 1.
    """

    message: Any
    fields: Mapping[str, Any]
    consumer: Any
    now_us: int

    @property
    def id(self) -> str:
        """The task's id; "" for one that is no text, of which Celery does not run the task."""
        found = self.fields.get("id")
        return found if isinstance(found, str) else ""

    @property
    def name(self) -> str:
        return self.fields.get("task") or ""

    @property
    def queue(self) -> str:
        """The queue it was consumed from; "" for none, and then it cannot wait in the broker."""
        return queue_of(self.consumer, self.message)

    @cached_property
    def delayed(self) -> Delayed | None:
        """Its wait in the broker, None if it did not wait."""
        return getattr(self.message, "native_delay", None)

    @property
    def is_cancelled(self) -> bool:
        """True if it waited and was cancelled meanwhile."""
        return self.delayed is not None and self.delayed.cancelled

    @property
    def has_headers(self) -> bool:
        """True in task protocol 2, where the headers tell everything."""
        return self.fields is self.message.headers

    @property
    def is_ours(self) -> bool:
        """False once the worker's connection is gone: the broker delivers it again."""
        return self.message.channel.connection is not None

    @cached_property
    def is_early(self) -> bool:
        """True if its ETA is so far ahead that it is worth another wait in the broker.

        Revoked and expired tasks are Celery's, and so is an ETA that is no date: it rejects them
        with its own words.
        """
        eta_us = due_us_or_none(self.fields.get("eta"))
        if eta_us is None or self.is_cancelled:
            return False
        expires_us = due_us_or_none(self.fields.get("expires"))
        return bool(
            eta_us - self.now_us > (SHORTEST_WAIT_US if self.delayed is None else CLOCK_SKEW_US)
            and self.id not in state.revoked
            and (expires_us is None or expires_us >= self.now_us)
        )

    def until_records_answer(self, delivery_id: str | None = None) -> WaitUntil:
        """The ruling while records that decide about the task are away."""
        return WaitUntil(self.now_us + AWAY_US, delivery_id, AskAgain(AWAY_US / 1e6))


@dataclass(frozen=True)
class Announce:
    """Celery gets the task at once and announces it as revoked; no other gate is asked."""


@dataclass(frozen=True)
class Drop:
    """The message is acknowledged, and its task does not run; the log says *why*.

    Monitors get an *event* with these fields. One that *expired* is counted as such.
    """

    why: str
    event: str | None = None
    fields: Mapping[str, Any] = field(default_factory=dict)
    expired: bool = False


@dataclass(frozen=True)
class AskAgain:
    """All gates are asked again in a moment.

    With *from_here* only this gate and those behind it. Meanwhile the message stays unacknowledged;
    *beside_prefetch* the worker may have another one. With *once* the moment begins when the
    callable is called that *once* is given.
    """

    after_seconds: float
    beside_prefetch: bool = False
    from_here: bool = False
    once: Callable[[Callable[[], object]], object] | None = field(default=None, compare=False)


@dataclass(frozen=True)
class WaitUntil:
    """The message waits in the broker until *due_us*, microseconds since the epoch.

    *delivery_id* is the one that it keeps, None for a new one. If it cannot wait there, *otherwise*
    holds; None asks the next gate. *headers* are put upon its own.
    """

    due_us: int
    delivery_id: str | None = None
    otherwise: AskAgain | None = None
    headers: Mapping[str, Any] = field(default_factory=dict)


Ruling: TypeAlias = Announce | Drop | AskAgain | WaitUntil

#: Rules on one matter; None lets the task pass on to the next gate. After the last, it runs.
Gate: TypeAlias = Callable[[Arrival], Ruling | None]


def queue_of(consumer: Any, message: Any) -> str:
    """The queue a message was consumed from, "" for none that it can be put back to."""
    known: str | None = getattr(message, "consumed_from", None)
    if known is not None:
        return known
    # AMQP only tells the consumer tag.
    tag = message.delivery_info.get("consumer_tag")
    tags = consumer.task_consumer._active_tags
    return next((queue for queue, active in tags.items() if active == tag), "")

"""An arriving task message, and the possible decisions of a gate (a check before a task runs).

The classes use no socket and no thread.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeAlias

from celery.worker import state

from ..due_time import due_us_or_none
from ..message import Delayed

#: A message that waited in the broker counts as due if it arrives up to this much early, in
#: microseconds: the clocks of producer and worker differ.
CLOCK_SKEW_US = 1_000_000

#: Celery's timer does waits shorter than this, in microseconds: a message that goes back to the
#: broker returns no sooner.
SHORTEST_WAIT_US = 100_000

#: Microseconds that a task waits in the broker if the records that decide about it are unreachable.
AWAY_US = 5_000_000


@dataclass(eq=False)
class Arrival:
    """A task message that has arrived in a worker, with the data on which gates decide.

    A gate is a check before a task runs. *fields* are the message's headers, or its payload in task
    protocol 1. *now_us* is the time of the check, in microseconds since the epoch.
    """

    message: Any
    fields: Mapping[str, Any]
    consumer: Any
    now_us: int

    @property
    def id(self) -> str:
        """The task's id, or "" if the id is not a text. Celery rejects such a message."""
        found = self.fields.get("id")
        return found if isinstance(found, str) else ""

    @property
    def name(self) -> str:
        return self.fields.get("task") or ""

    @property
    def queue(self) -> str:
        """The queue from which the message came.

        The name is "" for a broadcast, which cannot be put back into a queue.
        """
        return queue_of(self.consumer, self.message)

    @cached_property
    def delayed(self) -> Delayed | None:
        """The delay header of a message that waited in the broker, or None for other messages."""
        return getattr(self.message, "native_delay", None)

    @property
    def is_cancelled(self) -> bool:
        """True if the task was cancelled while its message waited in the broker."""
        return self.delayed is not None and self.delayed.cancelled

    @property
    def has_headers(self) -> bool:
        """True if the message is of task protocol 2, which has the task's id and ETA in headers."""
        return self.fields is self.message.headers

    @property
    def is_connected(self) -> bool:
        """False if the message's connection is lost. The broker then redelivers the message."""
        return self.message.channel.connection is not None

    @cached_property
    def is_early(self) -> bool:
        """True if the ETA is far enough ahead for the message to go back to the broker.

        False for a revoked or expired task, and for an ETA that is not a date. Celery handles these
        tasks.
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
        """Return the decision that the message waits in the broker for five seconds.

        A gate decides so if the records (state about waiting tasks) are unreachable.
        """
        return WaitUntil(self.now_us + AWAY_US, delivery_id, AskAgain(AWAY_US / 1e6))


@dataclass(frozen=True)
class Announce:
    """The decision to give the task to Celery, which announces the task as revoked.

    No later gate (check before a task runs) is asked.
    """


@dataclass(frozen=True)
class Drop:
    """The decision to acknowledge the message without running the task. The worker logs *why*.

    Monitors get an event of type *event* with *fields*. If *expired* is true, the message counts as
    expired.
    """

    why: str
    event: str | None = None
    fields: Mapping[str, Any] = field(default_factory=dict)
    expired: bool = False


@dataclass(frozen=True)
class AskAgain:
    """The decision to ask the gates (checks before a task runs) again after *after_seconds*.

    The message stays unacknowledged until then. If *from_here* is true, only this gate and the
    later gates are asked. If *beside_prefetch* is true, the prefetch count is one higher during the
    wait. If *once* is set, *once* is called with a function that starts the wait.
    """

    after_seconds: float
    beside_prefetch: bool = False
    from_here: bool = False
    once: Callable[[Callable[[], object]], object] | None = field(default=None, compare=False)


@dataclass(frozen=True)
class WaitUntil:
    """The decision to put the message back into the broker until *due_us*.

    *due_us* is in microseconds since the epoch. *headers* are added to the message. The message
    keeps the id *delivery_id*, or gets a new id if *delivery_id* is None.

    If the broker refuses the message, *otherwise* is carried out. If *otherwise* is None, the next
    gate (check before a task runs) decides.
    """

    due_us: int
    delivery_id: str | None = None
    otherwise: AskAgain | None = None
    headers: Mapping[str, Any] = field(default_factory=dict)


Ruling: TypeAlias = Announce | Drop | AskAgain | WaitUntil

#: A gate decides about an arrival. None lets the next gate decide; after the last the task runs.
Gate: TypeAlias = Callable[[Arrival], Ruling | None]


def queue_of(consumer: Any, message: Any) -> str:
    """Return the queue from which *message* was consumed.

    The name is "" if the message has no queue to go back to.
    """
    known: str | None = getattr(message, "consumed_from", None)
    if known is not None:
        return known
    # AMQP only tells the consumer tag.
    tag = message.delivery_info.get("consumer_tag")
    tags = consumer.task_consumer._active_tags
    return next((queue for queue, active in tags.items() if active == tag), "")

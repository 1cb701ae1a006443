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
    """A task message in a worker. Gates (checks before a task runs) decide about it at *now_us*.

    *fields* are the headers, or in task protocol 1 the payload. *now_us* counts from the epoch.
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
        """The queue from which the message came, or "" for a broadcast, which has none."""
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

        False for a revoked or expired task, and for a wrong ETA: Celery handles these.
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
        """Let the message wait in the broker for five seconds: the records are unreachable."""
        return WaitUntil(self.now_us + AWAY_US, delivery_id, AskAgain(AWAY_US / 1e6))


@dataclass(frozen=True)
class Announce:
    """Decision: Celery gets the task and announces it as revoked. No later check is made."""


@dataclass(frozen=True)
class Drop:
    """The decision to acknowledge the message without running the task. The worker logs *why*.

    Monitors get an *event* with *fields*. If *expired* is true, the message counts as expired.
    """

    why: str
    event: str | None = None
    fields: Mapping[str, Any] = field(default_factory=dict)
    expired: bool = False


@dataclass(frozen=True)
class AskAgain:
    """Decision: ask all gates (checks) again after *after_seconds*. The message stays unacked.

    If *from_here* is true, earlier gates are not asked. If *beside_prefetch* is true, the prefetch
    count is one higher meanwhile. *once* is called with a function that starts the wait.
    """

    after_seconds: float
    beside_prefetch: bool = False
    from_here: bool = False
    once: Callable[[Callable[[], object]], object] | None = field(default=None, compare=False)


@dataclass(frozen=True)
class WaitUntil:
    """The decision to put the message back into the broker until *due_us*, with more *headers*.

    The message keeps *delivery_id*, or gets a new id if that is None. If the broker refuses the
    message, *otherwise* is carried out; None means that the next gate (check) decides.
    """

    due_us: int
    delivery_id: str | None = None
    otherwise: AskAgain | None = None
    headers: Mapping[str, Any] = field(default_factory=dict)


Ruling: TypeAlias = Announce | Drop | AskAgain | WaitUntil

#: A gate decides about an arrival. None lets the next gate decide; after the last the task runs.
Gate: TypeAlias = Callable[[Arrival], Ruling | None]


def queue_of(consumer: Any, message: Any) -> str:
    """Return the queue from which *message* came, or "" if it has no queue to go back to."""
    known: str | None = getattr(message, "consumed_from", None)
    if known is not None:
        return known
    # AMQP only tells the consumer tag.
    tag = message.delivery_info.get("consumer_tag")
    tags = consumer.task_consumer._active_tags
    return next((queue for queue, active in tags.items() if active == tag), "")

"""A received task message, and the possible decisions about the message."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, TypeAlias

from celery.worker import state

from ..due_time import due_us_or_none
from ..message import Delayed

#: A message that waited in the broker counts as due if it arrives up to this much early, in
#: microseconds: the clocks of producer and worker differ.
CLOCK_SKEW_US = 1_000_000

#: Celery's timer, not the broker, does waits shorter than this, in microseconds: a message that
#: goes back to the broker takes about as long to return.
SHORTEST_WAIT_US = 100_000

#: Microseconds that a task waits in the broker if the store that decides about it does not answer.
AWAY_US = 5_000_000


@dataclass(eq=False)
class Arrival:
    """A task message that a worker received at *now_us* (microseconds since the epoch).

    *fields* are the message's headers. The only exception: in task protocol 1, *fields* are the
    message's body.
    """

    message: Any
    fields: Mapping[str, Any]
    consumer: Any
    now_us: int

    @property
    def id(self) -> str:
        """The task's id, or "" if the id is not a string."""
        found = self.fields.get("id")
        return found if isinstance(found, str) else ""

    @property
    def name(self) -> str:
        return self.fields.get("task") or ""

    @property
    def queue(self) -> str:
        """The queue that delivered the message, or "" if unknown, as after a fanout on Redis."""
        return queue_of(self.consumer, self.message)

    @property
    def delayed(self) -> Delayed | None:
        """The parsed header ``native_delay``, or None if the message did not wait."""
        return getattr(self.message, "native_delay", None)

    @property
    def is_cancelled(self) -> bool:
        """True if the task was cancelled while its message waited in the broker."""
        return self.delayed is not None and self.delayed.cancelled

    @property
    def has_headers(self) -> bool:
        """True if the message uses task protocol 2."""
        return self.fields is self.message.headers

    @property
    def is_connected(self) -> bool:
        """True until the message's connection is lost. Then the broker redelivers the message."""
        return self.message.channel.connection is not None

    @cached_property
    def is_early(self) -> bool:
        """True if the message arrived too early, and must return to the broker until its ETA.

        The only exceptions: cancelled, revoked and expired tasks are never early, because Celery
        handles them at once.
        """
        eta_us = due_us_or_none(self.fields.get("eta"))
        if eta_us is None or self.discarded is not None:
            return False
        allowed_us = SHORTEST_WAIT_US if self.delayed is None else CLOCK_SKEW_US
        return eta_us - self.now_us > allowed_us

    @cached_property
    def discarded(self) -> Literal["cancelled", "expired"] | None:
        """The reason why the task will not run: "cancelled", "expired", or None if it runs."""
        if self.is_cancelled or self.id in state.revoked:
            return "cancelled"
        return "expired" if self.is_expired else None

    @property
    def is_expired(self) -> bool:
        """True if the task's ``expires``, or else the message's ``expiration``, has passed."""
        # RabbitMQ removes ``expiration`` when it dead-letters a message, so our header has a copy.
        expires_us = due_us_or_none(self.fields.get("expires"))
        if expires_us is None and self.delayed is not None and self.delayed.expires_ms is not None:
            expires_us = self.delayed.expires_ms * 1000
        return expires_us is not None and expires_us < self.now_us

    def until_store_answers(self, delivery_id: str | None = None) -> WaitUntil:
        """Return the decision that the task waits 5 s, because the store does not answer.

        *delivery_id* is as in :class:`WaitUntil`.
        """
        # A broker that cannot delay leaves the task here, where other tasks must pass it.
        here = AskAgain(AWAY_US / 1e6, beside_prefetch=True)
        return WaitUntil(self.now_us + AWAY_US, delivery_id, here, in_broker=True)


@dataclass(frozen=True)
class Announce:
    """Decision: give the task to Celery, which announces the task as revoked."""


@dataclass(frozen=True)
class Drop:
    """Decision: acknowledge the message, log the reason *why*, and do not run the task.

    *event* and *fields*: type and data of a Celery event to send. *expired*: the message expired.
    """

    why: str
    event: str | None = None
    fields: Mapping[str, Any] = field(default_factory=dict)
    expired: bool = False


@dataclass(frozen=True)
class AskAgain:
    """Decision: keep the message unacknowledged, and check the task again after *after_seconds*.

    - *beside_prefetch*: True to raise the prefetch count by one during this time.
    - *from_here*: True to skip the checks that the task has passed already.
    - *begin_when*: None if *after_seconds* begin now. Otherwise the worker calls
      ``begin_when(start)``, and *after_seconds* begin when ``start()`` is called.
    """

    after_seconds: float
    beside_prefetch: bool = False
    from_here: bool = False
    begin_when: Callable[[Callable[[], object]], object] | None = field(default=None, compare=False)


@dataclass(frozen=True)
class WaitUntil:
    """Decision: return the message to the broker until *due_us*, with additional *headers*.

    - *delivery_id*: the delivery id that the message keeps, or None for a new id.
    - *otherwise*: the decision if the broker refuses the message. If None, the worker makes its
      remaining checks of the message.
    - *in_broker*: True if the message must not wait in the store, which does not answer.
    """

    due_us: int
    delivery_id: str | None = None
    otherwise: AskAgain | None = None
    headers: Mapping[str, Any] = field(default_factory=dict)
    in_broker: bool = False


Ruling: TypeAlias = Announce | Drop | AskAgain | WaitUntil

#: A gate is a check of a received task. A gate returns a decision, or None to let the next gate
#: decide. If all gates return None, the task runs.
Gate: TypeAlias = Callable[[Arrival], Ruling | None]


def queue_of(consumer: Any, message: Any) -> str:
    """Return the name of the queue that delivered *message*, or "" if unknown."""
    known: str | None = getattr(message, "consumed_from", None)
    if known is not None:
        return known
    # AMQP only tells the consumer tag.
    tag = message.delivery_info.get("consumer_tag")
    tags = consumer.task_consumer._active_tags
    return next((queue for queue, active in tags.items() if active == tag), "")

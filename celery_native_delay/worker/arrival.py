"""An arriving task message (:class:`Arrival`) and what a gate may decide about it (:data:`Ruling`).

Neither uses a socket or a thread.
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
    """A task message that the gates decide about at *now_us*, microseconds since the epoch.

    *fields* are the message's headers, or its payload in task protocol 1.
    """

    message: Any
    fields: Mapping[str, Any]
    consumer: Any
    now_us: int

    @property
    def id(self) -> str:
        """The task's id; "" if it is no text (Celery rejects such a message)."""
        found = self.fields.get("id")
        return found if isinstance(found, str) else ""

    @property
    def name(self) -> str:
        return self.fields.get("task") or ""

    @property
    def queue(self) -> str:
        """The queue that the message came from; "" for a broadcast, which cannot be put back."""
        return queue_of(self.consumer, self.message)

    @cached_property
    def delayed(self) -> Delayed | None:
        """The header of a message that waited in the broker; None if it did not wait."""
        return getattr(self.message, "native_delay", None)

    @property
    def is_cancelled(self) -> bool:
        """True if the task was cancelled while its message waited in the broker."""
        return self.delayed is not None and self.delayed.cancelled

    @property
    def has_headers(self) -> bool:
        """True in task protocol 2, which has the task's id and ETA in headers."""
        return self.fields is self.message.headers

    @property
    def is_connected(self) -> bool:
        """False if the worker lost the connection: the broker delivers the message again."""
        return self.message.channel.connection is not None

    @cached_property
    def is_early(self) -> bool:
        """True if the ETA is far enough ahead for the message to go back to the broker.

        False for revoked and expired tasks, and for an ETA that is no date: Celery handles those.
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
        """Wait in the broker for five seconds: the records that decide are unreachable."""
        return WaitUntil(self.now_us + AWAY_US, delivery_id, AskAgain(AWAY_US / 1e6))


@dataclass(frozen=True)
class Announce:
    """Celery gets the task at once and announces it as revoked; no later gate is asked."""


@dataclass(frozen=True)
class Drop:
    """The message is acknowledged and its task does not run; the worker logs *why*.

    Monitors get an event of type *event* with *fields*. *expired* counts the message as expired.
    """

    why: str
    event: str | None = None
    fields: Mapping[str, Any] = field(default_factory=dict)
    expired: bool = False


@dataclass(frozen=True)
class AskAgain:
    """All gates are asked again after *after_seconds*; the message stays unacknowledged until then.

    *from_here*: ask only this gate and the later ones. *beside_prefetch*: raise the prefetch count
    by one meanwhile. *once*: called with a callable that starts the wait.
    """

    after_seconds: float
    beside_prefetch: bool = False
    from_here: bool = False
    once: Callable[[Callable[[], object]], object] | None = field(default=None, compare=False)


@dataclass(frozen=True)
class WaitUntil:
    """The message goes back to the broker and waits until *due_us*, microseconds since the epoch.

    It keeps *delivery_id*, or gets a new one if that is None, and gets *headers* besides its own.
    If the broker cannot take it, *otherwise* is done; None asks the next gate.
    """

    due_us: int
    delivery_id: str | None = None
    otherwise: AskAgain | None = None
    headers: Mapping[str, Any] = field(default_factory=dict)


Ruling: TypeAlias = Announce | Drop | AskAgain | WaitUntil

#: A gate decides about an arrival; None lets the next gate decide. After the last the task runs.
Gate: TypeAlias = Callable[[Arrival], Ruling | None]


def queue_of(consumer: Any, message: Any) -> str:
    """The queue that *message* was consumed from; "" if it has none to go back to."""
    known: str | None = getattr(message, "consumed_from", None)
    if known is not None:
        return known
    # AMQP only tells the consumer tag.
    tag = message.delivery_info.get("consumer_tag")
    tags = consumer.task_consumer._active_tags
    return next((queue for queue, active in tags.items() if active == tag), "")

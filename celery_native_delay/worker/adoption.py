"""Tasks that reach a worker with their ETA ahead: put back into the broker instead of held.

They come from producers without this package, from another language or an older release.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import partial
from socket import socketpair
from time import time_ns
from typing import Any

from celery.exceptions import InvalidTaskError
from celery.utils.log import get_logger
from celery.worker import state
from kombu.exceptions import ContentDisallowed, DecodeError

from ..due_time import due_us
from ..errors import InvalidDueTime
from ..fence.run import HEADER
from ..message import Delayed
from ..transports.interface import Answer, Receipts
from .announcing import arrived

logger = get_logger(__name__)

#: How much too early a message that waited may arrive and still count as due, in microseconds:
#: the clocks of producer and worker differ.
CLOCK_SKEW_US = 1_000_000

#: A shorter wait, in microseconds, is left to Celery's timer: exact, and over before a message
#: has gone to the broker and back.
SHORTEST_WAIT_US = 100_000

#: For so long a task waits again while nobody can tell whether it may run, in microseconds.
AWAY_US = 5_000_000

#: Until a message is asked about again that is not decided on yet.
NOT_YET_SECONDS = 0.5

_CLOCK_SKEW = timedelta(microseconds=CLOCK_SKEW_US)
_NONE = timedelta()


@dataclass(frozen=True)
class EarlyTask:
    """A task message that is to wait in the broker again.

    *ack* settles it on the worker's connection; *hold* gives it to Celery, which holds it in
    memory until its ETA, as without us. Both must run in the consumer's thread.
    """

    message: Any
    due_us: int
    queue: str
    ack: Callable[[], Any]
    hold: Callable[[], Any]
    delivery_id: str | None = None

    @property
    def is_ours(self) -> bool:
        """False once the worker's connection is gone: the broker delivers it again."""
        return self.message.channel.connection is not None


@dataclass
class FencedTask:
    """A task message that belongs to a fenced run.

    *ack* settles it on the worker's connection, *again* has it judged once more; both will run in
    the consumer's thread.
    """

    message: Any
    name: str
    id: str
    queue: str
    ack: Callable[[], Any]
    again: Callable[[], Any]

    @property
    def is_ours(self) -> bool:
        """As of :attr:`EarlyTask.is_ours`."""
        return self.message.channel.connection is not None


class AdoptingStrategies(dict[str, Any]):
    """A consumer's strategies, each asking first whether the task came too early, or was fenced."""

    def __init__(
        self,
        consumer: Any,
        adopt: Callable[[EarlyTask], bool],
        admits: Callable[[FencedTask], bool],
        *,
        receipts: Callable[[], Receipts | None] = lambda: None,
        waits: Callable[[EarlyTask], bool] = lambda task: False,
        watching: Callable[[Callable[..., Any]], Callable[..., Any]] = lambda strategy: strategy,
        expired: Callable[[Any], None] = lambda message: None,
    ) -> None:
        """*receipts* are asked about what waited; with no answer, it runs unless it *waits*.

        *watching* wraps each strategy; *expired* is told of a message that is dropped as such.
        """
        super().__init__()
        self._consumer = consumer
        self._adopt = adopt
        self._admits = admits
        self._receipts = receipts
        self._waits = waits
        self._watching = watching
        self._expired = expired
        self.wake: Callable[[], Any] = lambda: None

    def __setitem__(self, name: str, strategy: Callable[..., Any]) -> None:
        super().__setitem__(name, self._asking(self._watching(strategy)))

    def _asking(self, strategy: Callable[..., Any]) -> Callable[..., Any]:
        def on_task(
            message: Any, payload: Any, ack: Any, reject: Any, callbacks: Any, **kwargs: Any
        ) -> Any:
            fields = payload if isinstance(payload, dict) else message.headers
            delayed: Delayed | None = getattr(message, "native_delay", None)
            now_us = time_ns() // 1000
            # Put back, it would lose its mark; and nothing is too early to be announced.
            cancelled = delayed is not None and delayed.cancelled

            def waits(put_back: Callable[[EarlyTask], bool], until_us: int, **more: Any) -> bool:
                task = EarlyTask(
                    message,
                    until_us,
                    queue_of(self._consumer, message),
                    self._ack_soon(message),
                    self._soon(strategy, message, payload, ack, reject, callbacks, **kwargs),
                    **more,
                )
                return bool(task.queue) and put_back(task)

            if delayed is not None:
                receipts = self._receipts()
                if receipts is not None and fields is message.headers:
                    answer = receipts.may_run(fields, delayed)
                    if answer is Answer.DROP:
                        logger.info("dropping task %s, which was moved", fields.get("id"))
                        return ack(logger, self._consumer.connection_errors)
                    if answer is Answer.NOT_YET:
                        again = partial(on_task, message, payload, ack, reject, callbacks, **kwargs)
                        return self._later(message, self._judging(message, payload, again))
                    if answer is Answer.AWAY and not cancelled:
                        until_us = now_us + AWAY_US
                        if waits(self._waits, until_us, delivery_id=delayed.delivery_id):
                            return None
                if not cancelled and _expired(delayed, fields, now_us):
                    logger.info("discarding expired task %s", fields.get("id"))
                    self._expired(message)
                    return ack(logger, self._consumer.connection_errors)
                if cancelled:
                    arrived(fields["id"])
            eta = fields.get("eta")
            early = bool(eta) and not cancelled and self._is_early(delayed, fields, now_us)
            if eta and early and waits(self._adopt, due_us(eta)):
                return None
            if HEADER in message.headers and not cancelled:
                again = partial(on_task, message, payload, ack, reject, callbacks, **kwargs)
                if not self._admits(self._fenced(message, payload, fields, again)):
                    return None
            if eta and not early and delayed is not None and fields is message.headers:
                # Celery would parse it, in 20 µs, for a timer that is not to run.
                message.kept_eta = fields.pop("eta")
                try:
                    return strategy(message, payload, ack, reject, callbacks, **kwargs)
                finally:
                    fields["eta"] = eta
            return strategy(message, payload, ack, reject, callbacks, **kwargs)

        return on_task

    def _fenced(
        self, message: Any, payload: Any, fields: dict[str, Any], judge: Callable[[], Any]
    ) -> FencedTask:
        return FencedTask(
            message,
            fields.get("task", ""),
            fields.get("id", ""),
            queue_of(self._consumer, message),
            self._ack_soon(message),
            self._judging(message, payload, judge),
        )

    def _judging(self, message: Any, payload: Any, judge: Callable[[], Any]) -> Callable[[], Any]:
        """*judge* in the consumer's thread, with the errors that Celery expects of strategies."""
        consumer = self._consumer

        def again() -> None:
            try:
                judge()
            except (InvalidTaskError, ContentDisallowed) as exc:
                consumer.on_invalid_task(payload, message, exc)
            except DecodeError as exc:
                consumer.on_decode_error(message, exc)

        return self._then_wake(self._unless_green(consumer.call_soon), again)

    def _later(self, message: Any, again: Callable[[], Any]) -> None:
        """Call *again* in a moment; meanwhile the message is unacknowledged."""

        def unless_gone() -> None:
            if message.channel.connection is not None:
                again()

        self._consumer.timer.call_after(NOT_YET_SECONDS, unless_gone)

    def _ack_soon(self, message: Any) -> Callable[[], Any]:
        """Acknowledge *message* in the consumer's thread.

        Not by the promise that Celery hands to strategies: called there, it asks for a second
        turn of the loop, which nothing wakes up for.
        """
        consumer = self._consumer
        call_soon = self._unless_green(getattr(consumer, "call_soon_ack", consumer.call_soon))
        return self._then_wake(call_soon, message.ack_log_error, logger, consumer.connection_errors)

    def _unless_green(self, call_soon: Callable[..., Any]) -> Callable[..., Any]:
        """*call_soon*, or a plain call where greenlets share a thread, as in Celery 5.7.

        There call_soon() without a hub waits until drain_events() times out, 2 s later.
        """
        consumer = self._consumer
        green = consumer.hub is None and getattr(consumer.pool, "is_green", False)
        return _call_now if green else call_soon

    def _soon(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Callable[[], Any]:
        return self._then_wake(self._consumer.call_soon, partial(call, *args, **kwargs))

    def _then_wake(self, call: Callable[..., Any], *args: Any) -> Callable[[], Any]:
        def call_and_wake() -> None:
            call(*args)
            self.wake()

        return call_and_wake

    def _is_early(self, delayed: Delayed | None, fields: dict[str, Any], now_us: int) -> bool:
        """Whether the task is worth another wait; revoked and expired ones are Celery's."""
        try:
            wait_us = due_us(fields["eta"]) - now_us
        except (InvalidDueTime, TypeError):
            return False  # Celery rejects it, with its own words
        enough = SHORTEST_WAIT_US if delayed is None else CLOCK_SKEW_US
        return bool(
            wait_us > enough
            and fields.get("id") not in state.revoked
            and not _past(fields.get("expires"), now_us)
        )


class Waker:
    """Interrupts an event loop's poll() from another thread.

    kombu's own does so since 5.7; before, a callback was seen up to a second later, with the
    worker's prefetch full of tasks that wait to be acknowledged.
    """

    def __init__(self, hub: Any) -> None:
        self._reader, self._writer = socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)
        hub.add_reader(self._reader, self._drain)

    def wake(self) -> None:
        """Have poll() return now."""
        with suppress(OSError):  # full: it is awake already
            self._writer.send(b"\0")

    def close(self) -> None:
        """Free the sockets; the hub forgets a closed reader when it is reset."""
        self._reader.close()
        self._writer.close()

    def _drain(self) -> None:
        with suppress(OSError):
            self._reader.recv(4096)


def forget_eta(request: Any, now: datetime) -> None:
    """Keep a request that is due out of the worker's ETA timer.

    It need not wait if its ETA has come or its message did its waiting. ``task.request.eta`` still
    tells the user's code the original.
    """
    kept: str | None = getattr(request.message, "kept_eta", None)
    if kept is not None:
        request.request_dict["eta"] = kept
    elif request.eta is not None:
        waited = getattr(request.message, "native_delay", None) is not None
        if request.eta <= now + (_CLOCK_SKEW if waited else _NONE):
            request._eta = None


def queue_of(consumer: Any, message: Any) -> str:
    """The queue a message was consumed from, "" for none that it can be put back to."""
    known: str | None = getattr(message, "consumed_from", None)
    if known is not None:
        return known
    # AMQP only tells the consumer tag.
    tag = message.delivery_info.get("consumer_tag")
    tags = consumer.task_consumer._active_tags
    return next((queue for queue, active in tags.items() if active == tag), "")


def _call_now(call: Callable[..., Any], *args: Any) -> None:
    call(*args)


def _expired(delayed: Delayed, fields: dict[str, Any], now_us: int) -> bool:
    """Whether a per-message ``expiration`` ran out while the message waited.

    RabbitMQ forgets it when dead-lettering, so it is kept here. A task's own ``expires`` is
    Celery's: it tells the result backend.
    """
    if delayed.expires_ms is None or fields.get("expires"):
        return False
    return now_us > delayed.expires_ms * 1000


def _past(expires: Any, now_us: int) -> bool:
    try:
        return bool(expires) and due_us(expires) < now_us
    except (InvalidDueTime, TypeError):
        return False

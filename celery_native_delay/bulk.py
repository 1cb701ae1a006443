"""Publish many delayed tasks of an app: confirmed, in little time, none dropped in silence.

    with bulk(app) as batch:
        for order in orders:
            batch.send("shop.remind", kwargs={"order": order.id}, eta=order.due)
    print(batch.result)

The first task of each kind (name, route and options) goes the way ``apply_async`` takes it; those
after it through a template, as long as nothing is in play that needs more than that:
publish signals, links, stamps, compression, another serializer or protocol, ``expires``, routers
written as functions. Whatever is, decides by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from time import monotonic, time_ns
from types import TracebackType
from typing import Any, Self

from celery import Celery, Task
from celery.utils.saferepr import saferepr
from kombu.utils import json

from .celery_app.install import LONGEST_CELERY_SECONDS, checked_app, installation_of
from .celery_app.plain_publishing import is_plain, nobody_listens, publishes_plainly
from .core.due_time import due_us as due_us_of
from .core.errors import PublishRefused, UnsupportedBroker
from .core.random_ids import RandomIds
from .core.refusal import RefusedMessage
from .kombu_hook import OPTION, asks_for_delays

__all__ = ("Bulk", "BulkResult", "bulk")

#: Options that are the same for all tasks of a kind and leave their trace in the template.
_TEMPLATE_OPTIONS = frozenset(
    ("queue", "exchange", "routing_key", "priority", "ignore_result", "shadow", "time_limit",
     "soft_time_limit", "delivery_mode", "retry")
)  # fmt: skip

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_SIMPLE = frozenset((str, int, bool, type(None)))
_ENCODER = json.JSONEncoder()
_NO_CANVAS = ', {"callbacks": null, "errbacks": null, "chain": null, "chord": null}]'

#: Refusals kept until sending stops: what fails by the thousand needs a person.
MOST_REFUSED = 10_000


@dataclass
class BulkResult:
    """What became of the tasks of a batch.

    *in_doubt* were sent, but the broker could not be asked: they may have arrived.
    """

    sent: int = 0
    by_template: int = 0
    refused: list[RefusedMessage] = field(default_factory=list)
    in_doubt: list[RefusedMessage] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def confirmed(self) -> int:
        """Tasks that the broker has taken responsibility for, once the batch has ended."""
        return self.sent - len(self.refused) - len(self.in_doubt)

    @property
    def returned(self) -> list[RefusedMessage]:
        """Those of *refused* that led nowhere."""
        return [message for message in self.refused if message.returned]

    def __str__(self) -> str:
        return (
            f"{self.sent} sent, {self.confirmed} confirmed, {len(self.refused)} refused, "
            f"{len(self.in_doubt)} in doubt in {self.seconds:.1f} s"
        )


class Bulk:
    """A batch being sent; made by :func:`bulk`. For one thread, on a connection of its own."""

    def __init__(
        self,
        app: Celery,
        *,
        window: int | None = None,
        on_progress: Callable[[BulkResult], object] | None = None,
        progress_every: int = 1000,
        check: bool = True,
        timeout_seconds: float | None = 60.0,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        installation = installation_of(checked_app(app))
        if installation is None or not installation.enabled:
            raise UnsupportedBroker(
                "expected an app with native delays: call celery_native_delay.install(app) first"
            )
        for name, number in (("window", window), ("progress_every", progress_every)):
            if number is not None and (not isinstance(number, int) or number < 1):
                raise ValueError(f"expected {name} to be a whole number from 1, got {number!r}")
        self.result = BulkResult()
        self._app = app
        self._window = window or installation.settings().confirm_window
        self._on_progress = on_progress
        self._progress_every = progress_every
        self._check = check
        self._timeout_seconds = timeout_seconds
        self._headers = dict(headers or {})
        self._ids = RandomIds()
        self._kinds: dict[Any, Any] = {}
        self._line: Any = None
        self._generation = 0
        self._second = -1
        self._iso_parts = ("", "")
        self._started = 0.0

    def __enter__(self) -> Self:
        with self._app.connection_for_write() as connection:
            check_broker(connection)
            self._line = connection.transport.bulk_line(window=self._window)
        self._app.finalize()
        self._tasks = self._app._tasks
        self._timezone = self._app.timezone
        amqp = self._app.amqp
        self._repr_sizes = amqp.argsrepr_maxsize, amqp.kwargsrepr_maxsize
        self._repr_levels = getattr(self._app.conf, "task_repr_maxlevels", 3)
        self._templates_fit = publishes_plainly(self._app)
        self._started = monotonic()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        result = self.result
        try:
            self._line.settle(timeout_seconds=self._timeout_seconds)
        except TimeoutError:
            result.in_doubt += self._line.give_up()
        finally:
            result.refused += self._line.take_refused()
            result.seconds = monotonic() - self._started
            self._line.close()
        self._tell()
        if kind is None and self._check and (result.refused or result.in_doubt):
            raise PublishRefused(f"{result}", (*result.refused, *result.in_doubt))

    def send(
        self,
        task: str | Task,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        eta: datetime | str | None = None,
        countdown: float | None = None,
        task_id: str | None = None,
        **options: Any,
    ) -> str:
        """Send a task as ``apply_async`` would, without waiting for the broker.

        Args:
            task: the task or its name; it need not be registered here.
            args, kwargs: its arguments.
            eta: the due time; a naive one is UTC.
            countdown: seconds from now, instead of *eta*.
            task_id: a UUID by default.
            **options: any of ``apply_async``: ``queue``, ``priority``, ``expires``, …

        Returns:
            The task's id.

        Raises:
            NativeDelayError: it cannot wait; the others are not affected.
            PublishRefused: the broker has refused :data:`MOST_REFUSED` tasks.
            OSError, amqp.exceptions.AMQPError: there has been no connection for a minute; this
                task was not sent.
        """
        task_id = task_id or self._ids.uuid()
        name = task if isinstance(task, str) else task.name
        key: Any = (name, *sorted(options.items())) if options else name
        fits = (
            self._templates_fit
            and nobody_listens()
            and options.keys() <= _TEMPLATE_OPTIONS
            and (not options or _hashable(key))
        )
        sent, kind = False, None
        if fits:
            if self._line.generation != self._generation:
                self._kinds.clear()
            kind = self._kinds.get(key)
            if kind is not None:
                sent = self._send_by(kind, name, args, kwargs or {}, eta, countdown, task_id)
        if not sent:
            self._send_the_long_way(task, args, kwargs, eta, countdown, task_id, options)
            self._generation = self._line.generation
            if fits and (kind is not None or key not in self._kinds):
                self._learn(key, name)
        result = self.result
        result.sent += 1
        if result.sent % self._progress_every == 0:
            self._tell()
            if len(result.refused) >= MOST_REFUSED:
                refused = tuple(result.refused)
                raise PublishRefused(f"{result}; the first being {refused[0]}", refused)
        return task_id

    # --- private -------------------------------------------------------------------------

    def _send_by(
        self,
        kind: Any,
        name: str,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        eta: datetime | str | None,
        countdown: float | None,
        task_id: str,
    ) -> bool:
        """Whether it was sent by template."""
        if type(args) not in (list, tuple) or type(kwargs) is not dict:
            return False
        if countdown:
            if type(countdown) not in (int, float) or not countdown < LONGEST_CELERY_SECONDS:
                return False
            due_us = time_ns() // 1000 + round(countdown * 1_000_000)
            text = self._iso(due_us)
        elif eta:
            due_us = due_us_of(eta)
            text = eta if isinstance(eta, str) else eta.isoformat()
        else:
            return False
        task = self._tasks.get(name)
        if task is not None and getattr(task, "typing", False):
            task.__header__(*args, **kwargs)
        body = _ENCODER.encode((args, kwargs))[:-1] + _NO_CANVAS
        self.result.by_template += (
            sent := self._line.send(
                kind,
                due_us,
                task_id,
                text,
                self._repr(args, self._repr_sizes[0]),
                self._repr(kwargs, self._repr_sizes[1]),
                body.encode(),
            )
        )
        return bool(sent)

    def _iso(self, due_us: int) -> str:
        """ISO 8601 text in the app's time zone; within one second only the fraction changes."""
        second, us = divmod(due_us, 1_000_000)
        if second != self._second:
            whole = (_EPOCH + timedelta(seconds=second)).astimezone(self._timezone).isoformat()
            self._second, self._iso_parts = second, (whole[:19], whole[19:])
        start, zone = self._iso_parts
        return f"{start}.{us:06}{zone}" if us else f"{start}{zone}"

    def _repr(self, arguments: Any, max_size: int) -> str:
        return short_repr(arguments, max_size) or saferepr(
            arguments, max_size, maxlevels=self._repr_levels
        )

    def _send_the_long_way(
        self,
        task: str | Task,
        args: Sequence[Any],
        kwargs: Mapping[str, Any] | None,
        eta: datetime | str | None,
        countdown: float | None,
        task_id: str,
        options: dict[str, Any],
    ) -> None:
        when = {"eta": eta, "countdown": countdown, "task_id": task_id, **options, "retry": False}
        if self._headers:
            when["headers"] = self._headers | (options.get("headers") or {})
        known = self._tasks.get(task) if isinstance(task, str) else task

        def publish(producer: Any) -> None:
            # add_to_parent: a million results have no place in a parent's memory.
            with_producer = {**when, "producer": producer, "add_to_parent": False}
            if known is None:
                self._app.send_task(task, args, kwargs, **with_producer)
            else:
                known.apply_async(args, kwargs, **with_producer)

        self._line.publish(publish)

    def _learn(self, key: Any, name: str) -> None:
        """Find out whether others of this kind can be sent by template."""
        task = self._tasks.get(name)
        if task is not None and not is_plain(task, self._app):
            self._kinds[key] = None
        elif (kind := self._line.learn()) is not None:
            self._kinds[key] = kind

    def _tell(self) -> None:
        result = self.result
        result.refused += self._line.take_refused()
        result.seconds = monotonic() - self._started
        if self._on_progress is not None:
            self._on_progress(result)


def bulk(app: Celery, **options: Any) -> Bulk:
    """A batch of delayed tasks of *app*, to be used in a ``with`` block.

    Leaving the block waits until the broker has confirmed everything; ``batch.result`` then tells
    what became of it.

    Args:
        app: an installed Celery app.
        window: messages that may be unconfirmed at a time; ``native_delay_confirm_window`` by
            default. No more than these are kept in memory.
        on_progress: called with the :class:`BulkResult` so far.
        progress_every: how many tasks lie between two such calls; 1000 by default.
        check: False: leave refused tasks to the result instead of raising at the end.
        timeout_seconds: how long leaving the block waits for the broker, 60 by default; None for
            as long as it takes.
        headers: what every message of the batch carries besides its own; also by template.

    Raises:
        UnsupportedBroker: *app* is not installed, or nothing can wait on its broker.
        PublishRefused: leaving the block, when some were refused or are in doubt.
    """
    return Bulk(app, **options)


def check_broker(connection: Any) -> None:
    """Refuse a broker in which nothing can wait; *connection* is an installed app's.

    Raises:
        UnsupportedBroker: saying the way out.
    """
    if not asks_for_delays((connection.transport_options or {}).get(OPTION)):
        raise UnsupportedBroker(
            f"expected a broker in which delayed tasks can wait, got {connection.as_uri()}: set "
            f"native_delay_store to the URL of a database, or use another broker"
        )


def short_repr(arguments: Any, max_size: int) -> str | None:
    """``repr`` of flat arguments that Celery's ``saferepr`` would not shorten; None for others.

    Celery's takes ten times as long for the same text.
    """
    values = arguments.values() if type(arguments) is dict else arguments
    if not _SIMPLE.issuperset(map(type, values)):
        return None
    text = repr(arguments)
    # Celery's escapes nothing, and shortens.
    plain = "\\" not in text and '"' not in text and len(text) < min(max_size, 128)
    return text if plain else None


def _hashable(key: Any) -> bool:
    try:
        hash(key)
    except TypeError:
        return False
    return True

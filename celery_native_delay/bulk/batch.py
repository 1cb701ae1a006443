"""Publish many delayed tasks of an app fast, with publisher confirms.

    with bulk(app) as batch:
        for order in orders:
            batch.send("shop.remind", kwargs={"order": order.id}, eta=order.due)
    print(batch.result)

``apply_async`` publishes the first two tasks with the same name, route and options. Further tasks
are copies of the first encoded message, with another task id, due time and arguments.

The only exceptions:

- If other code sees or changes the messages, ``apply_async`` publishes every task. Examples of such
  code are receivers of publish signals, wrapped or overridden methods, and router functions.
- ``apply_async`` publishes each task with links, stamps, compression, ``expires``, a serializer
  other than JSON, or task protocol 1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from time import monotonic
from typing import Any, Self

from celery import Celery, Task
from celery.local import maybe_evaluate
from celery.utils.saferepr import saferepr
from kombu.utils import json

from ..app.installation import LONGEST_CELERY_SECONDS, checked_app, installation_of
from ..due_time import due_us as due_us_of
from ..durations import duration
from ..errors import PublishRefused, RefusedMessage, UnsupportedBroker
from ..now import moment, time_ns
from ..transports.aliases import OPTION, asks_for_delays
from ..transports.bulk_publisher import RandomIds
from .kinds import Kinds, Made, Sample

#: Options of ``send`` that an encoded message may contain: only tasks with equal options share it.
_TEMPLATE_OPTIONS = frozenset(
    ("queue", "exchange", "routing_key", "priority", "ignore_result", "shadow", "time_limit",
     "soft_time_limit", "delivery_mode", "retry")
)  # fmt: skip

_SIMPLE = frozenset((str, int, bool, type(None)))
_ENCODER = json.JSONEncoder()
_NO_CANVAS = ', {"callbacks": null, "errbacks": null, "chain": null, "chord": null}]'

#: The largest number of unconfirmed messages, unless the caller names another.
WINDOW = 1000

#: ``send`` raises PublishRefused when the broker has refused this many tasks.
MOST_REFUSED = 10_000

#: ``send`` reads the broker's refusals after every so many tasks.
_LOOK_EVERY = 1000


@dataclass
class BulkResult:
    """The result of :func:`bulk`: the number of sent tasks, and the tasks without a confirm.

    ``refused`` lists the tasks that the broker refused. ``in_doubt`` lists the tasks that the
    broker may or may not have received. ``by_template`` counts the tasks that were sent as copies
    of an encoded message.
    """

    sent: int = 0
    by_template: int = 0
    refused: list[RefusedMessage] = field(default_factory=list)
    in_doubt: list[RefusedMessage] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def confirmed(self) -> int:
        """The number of tasks that the broker confirmed; valid after the ``with`` block."""
        return self.sent - len(self.refused) - len(self.in_doubt)

    @property
    def returned(self) -> list[RefusedMessage]:
        """The refused tasks that the broker returned, because no queue matches the routing key."""
        return [message for message in self.refused if message.returned]

    def __str__(self) -> str:
        return (
            f"{self.sent} sent, {self.confirmed} confirmed, {len(self.refused)} refused, "
            f"{len(self.in_doubt)} in doubt in {duration(self.seconds)}"
        )


class Bulk:
    """Sends many delayed tasks over one broker connection, for one thread. Use :func:`bulk`."""

    def __init__(
        self,
        app: Celery,
        *,
        window: int = WINDOW,
        check: bool = True,
        timeout_seconds: float | None = 60.0,
        headers: Mapping[str, Any] | None = None,
    ) -> None:
        installation = installation_of(checked_app(app))
        if installation is None or not installation.enabled:
            raise UnsupportedBroker(
                "expected an app with native delays: call celery_native_delay.install(app) first"
            )
        if not isinstance(window, int) or window < 1:
            raise ValueError(f"expected window to be a whole number from 1, got {window!r}")
        self.result = BulkResult()
        self._app = installation.app
        self._installation = installation
        self._window = window
        self._check = check
        self._timeout_seconds = timeout_seconds
        self._headers = dict(headers or {})
        self._ids = RandomIds()
        self._kinds: Any = None
        self._publisher: Any = None
        self._second = -1
        self._iso_parts = ("", "")
        self._started = 0.0
        self._is_open = False

    def __enter__(self) -> Self:
        with self._app.connection_for_write() as connection:
            check_broker(connection)
            self._publisher = connection.transport.bulk_publisher(window=self._window)
        self._kinds = Kinds(self._installation, self._publisher, self._iso)
        self._app.finalize()
        self._tasks = self._app._tasks
        self._timezone = self._app.timezone
        amqp = self._app.amqp
        self._repr_sizes = amqp.argsrepr_maxsize, amqp.kwargsrepr_maxsize
        self._repr_levels = getattr(self._app.conf, "task_repr_maxlevels", 3)
        self._started = monotonic()
        self._is_open = True
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        result = self.result
        self._is_open = False
        try:
            self._publisher.outbox.settle(timeout_seconds=self._timeout_seconds)
        except TimeoutError:
            result.in_doubt += self._publisher.outbox.give_up()
        finally:
            result.refused += self._publisher.outbox.take_refused()
            result.seconds = monotonic() - self._started
            self._publisher.outbox.close()
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
        """Send a delayed task like ``apply_async``, without waiting for the broker's confirm.

        Args:
            task: the task or its name. A task given by name need not be registered in this app.
            args, kwargs: the task's arguments.
            eta: the due time; a naive datetime is UTC.
            countdown: the delay in seconds; give either *countdown* or *eta*.
            task_id: the task's id; a UUID by default.
            **options: other options of ``apply_async``: ``queue``, ``priority``, ``expires``, …

        Returns:
            The task's id.

        Raises:
            NativeDelayError: this task cannot be delayed. Other tasks can still be sent.
            PublishRefused: the broker has refused :data:`MOST_REFUSED` tasks.
            RuntimeError: the ``with`` block has not begun or has ended; the task was not sent.
            OSError, amqp.exceptions.AMQPError: the connection has been lost for a minute, or the
                broker rejects the app's login. The task was not sent. During one outage only the
                first call of ``send`` waits for a minute.
        """
        if not self._is_open:
            raise RuntimeError("expected send() within the block `with bulk(app) as batch:`")
        result = self.result
        task_id = task_id or self._ids.uuid()
        if isinstance(task, str):
            known = self._tasks.get(task)
        else:
            known = task = maybe_evaluate(task)
        key: Any = task if known is None else known
        if options:
            # 1, 1.0 and True are equal keys, but give different messages.
            key = (key, tuple(options.items()), tuple(map(type, options.values())))
        sent, made, may_copy = False, None, False
        if options.keys() <= _TEMPLATE_OPTIONS and _hashable(key):
            may_copy = self._kinds.may_copy(key)
            kind = self._kinds.of(key) if may_copy else None
            if kind is not None:
                made = self._made(known, args, kwargs or {}, eta, countdown, task_id)
                if made is not None and kind.serves(made, self._publisher.outbox.connects):
                    sent = self._publisher.send(kind.learnt, made.due_us, made.values)
                    result.by_template += sent
        if not sent:
            when = {"eta": eta, "countdown": countdown, "task_id": task_id}
            way = task if known is None else known
            self._apply_async(way, (args, kwargs), when | options)
            if may_copy:
                self._kinds.learn(Sample(key, known, task_id, bool(countdown), made))
        result.sent += 1
        if result.sent % _LOOK_EVERY == 0:
            result.refused += self._publisher.outbox.take_refused()
            if len(result.refused) >= MOST_REFUSED:
                refused = tuple(result.refused)
                raise PublishRefused(f"{result}; the first being {refused[0]}", refused)
        return task_id

    @property
    def unconfirmed_count(self) -> int:
        """The number of sent tasks that the broker has neither confirmed nor refused."""
        waiting = 0 if self._publisher is None else int(self._publisher.outbox.unconfirmed_count)
        return len(self.result.in_doubt) + waiting

    @property
    def has_given_up(self) -> bool:
        """True if the connection was lost for a minute, or the broker rejects the login."""
        return bool(self._publisher.outbox.has_given_up)

    def _made(
        self,
        known: Task | None,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        eta: datetime | str | None,
        countdown: float | None,
        task_id: str,
    ) -> Made | None:
        """Return a task's id, due time and arguments; None if ``apply_async`` must publish."""
        if type(args) not in (list, tuple) or type(kwargs) is not dict:
            return None
        at_us = time_ns() // 1000
        if countdown:
            if type(countdown) not in (int, float) or not countdown < LONGEST_CELERY_SECONDS:
                return None
            due_us = at_us + round(countdown * 1_000_000)
            text = self._iso(due_us)
        elif eta:
            due_us = due_us_of(eta)
            text = eta if isinstance(eta, str) else eta.isoformat()
        else:
            return None
        args = args or ()  # as Celery does, so that argsrepr is the same
        try:
            body = (_ENCODER.encode((args, kwargs))[:-1] + _NO_CANVAS).encode()
        except (TypeError, ValueError):  # such as Pydantic models, which apply_async dumps
            return None
        if known is not None and getattr(known, "typing", False):
            known.__header__(*args, **kwargs)
        values = (
            task_id,
            text,
            self._repr(args, self._repr_sizes[0]),
            self._repr(kwargs, self._repr_sizes[1]),
            body,
        )
        return Made(at_us, due_us, values)

    def _iso(self, due_us: int) -> str:
        """Return the due time as ISO 8601 in the app's time zone."""
        second, us = divmod(due_us, 1_000_000)
        if second != self._second:
            whole = moment(second * 1_000_000).astimezone(self._timezone).isoformat()
            self._second, self._iso_parts = second, (whole[:19], whole[19:])
        start, zone = self._iso_parts
        return f"{start}.{us:06}{zone}" if us else f"{start}{zone}"

    def _repr(self, arguments: Any, max_size: int) -> str:
        return short_repr(arguments, max_size) or saferepr(
            arguments, max_size, maxlevels=self._repr_levels
        )

    def _apply_async(self, task: Any, arguments: Any, options: dict[str, Any]) -> None:
        options["retry"] = False
        if self._headers:
            options["headers"] = self._headers | (options.get("headers") or {})

        def publish(producer: Any) -> None:
            # Without add_to_parent: a parent task would keep a million results in memory.
            with_producer = {**options, "producer": producer, "add_to_parent": False}
            if isinstance(task, str):
                self._app.send_task(task, *arguments, **with_producer)
            else:
                task.apply_async(*arguments, **with_producer)

        self._publisher.publish(publish)


def bulk(
    app: Celery,
    *,
    window: int = WINDOW,
    check: bool = True,
    timeout_seconds: float | None = 60.0,
    headers: Mapping[str, Any] | None = None,
) -> Bulk:
    """Return a batch that publishes many delayed tasks of *app* fast, in a ``with`` block.

    At the end of the block, the batch waits up to *timeout_seconds* for the broker's confirms. Then
    ``batch.result`` has the number of sent tasks, and lists the tasks without a confirm.

    Args:
        app: a Celery app with ``install(app)``.
        window: the largest number of unconfirmed messages, which the batch keeps in memory.
        check: True (the default) raises PublishRefused at the end of the block if tasks were not
            confirmed. With False, read these tasks in ``batch.result``.
        timeout_seconds: seconds to wait for confirms at the end of the block; 60 by default, None
            for no limit.
        headers: headers for every message of the batch.

    Raises:
        UnsupportedBroker: ``install(app)`` was not called, or the broker cannot delay tasks.
        PublishRefused: at the end of the block, if the broker refused or did not confirm tasks, and
            *check* is True.
    """
    return Bulk(app, window=window, check=check, timeout_seconds=timeout_seconds, headers=headers)


def check_broker(connection: Any) -> None:
    """Raise UnsupportedBroker if the broker cannot delay tasks."""
    if not asks_for_delays((connection.transport_options or {}).get(OPTION)):
        raise UnsupportedBroker(
            f"expected a broker in which delayed tasks can wait, got {connection.as_uri()}: set "
            f"native_delay_store to the URL of a database, or use another broker"
        )


def short_repr(arguments: Any, max_size: int) -> str | None:
    """Return the same text as ``saferepr``, but faster; None for nested or long arguments."""
    values = arguments.values() if type(arguments) is dict else arguments
    if not _SIMPLE.issuperset(map(type, values)):
        return None
    text = repr(arguments)
    # saferepr escapes nothing, and shortens long texts.
    plain = "\\" not in text and '"' not in text and len(text) < min(max_size, 128)
    return text if plain else None


def _hashable(key: Any) -> bool:
    try:
        hash(key)
    except TypeError:
        return False
    return True

"""Debounce, throttle and unique: calls with the same key send one task instead of many.

Each publish checks the key's stored state, and stores the message and the new state in one step.
Before the publish, ``unique`` and ``throttle`` also read the state. If the state shows that the
call sends no task, the call ends without a publish. The only exception:
``throttle(edge="trailing")`` publishes without this read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from functools import partial
from typing import Any, Literal, TypeAlias

from billiard.exceptions import SoftTimeLimitExceeded
from celery import Task, states, uuid
from celery.backends.base import DisabledBackend
from celery.canvas import Signature
from celery.result import AsyncResult, EagerResult
from celery.utils.log import get_logger

from ..due_time import due_us
from ..errors import CannotDelay, described
from ..keyed import rules
from ..keyed.record import CALLS, HEADER, Mark, name_of
from ..keyed.records import KeyRecords, publish_under
from ..keyed.rules import Seen, Step
from ..now import time_ns
from ..rates.declared import (
    Debounce,
    DeclaredKey,
    Edge,
    Throttle,
    Unique,
    Until,
    check_collect,
    check_word,
    microseconds,
    periods_us,
)
from ..records.publishing import Collect, publishing
from ..store.entry import StoreEntry
from ..texts import is_text
from ..transports.aliases import delay_headers
from .broker import ask_on_a_connection
from .installation import delaying_channel, installation_of
from .updating import arguments_of, check_signature, with_arguments

logger = get_logger(__name__)

KeyKind: TypeAlias = Literal["debounce", "throttle", "throttle-trailing", "unique"]

#: A function of ``keyed/rules.py`` that takes a key's stored state and the new task's id.
_Call: TypeAlias = Callable[[Seen, str], Step]


class KeyedCalls:
    """The methods ``debounce``, ``throttle`` and ``unique`` of the class ``Delay``."""

    def __init__(self, app: Any) -> None:
        self._app = app
        self._is_checked = False

    def debounce(
        self,
        signature: Signature,
        *,
        key: str,
        seconds: float,
        max_wait_seconds: float | None = None,
        announce: bool = False,
        collect: int | None = None,
    ) -> KeyedResult:
        """Run a task once, *seconds* after the last of several calls with the same *key*.

        Args:
            signature: the signature of a single task, such as ``reindex.s(7)``. Tasks with
                different names do not share a key.
            key: any text, such as "user:7".
            max_wait_seconds: the longest delay if calls keep coming, in seconds from the first of
                these calls. By default, each call delays the task again, without a limit.
            announce: set the results of replaced tasks to REVOKED, with the reason. By default
                these results stay pending.
            collect: give the task the arguments of all these calls, in the keyword argument
                ``calls``: a list of ``[args, kwargs]``, the first call first. The call that is
                number *collect* (2 to 1000) runs the task at once; the next begins a new one.

        Returns:
            the result of the new task. The field *replaced* of the result is the id of the waiting
            task that the new task replaced, or None.

        Raises:
            UnsupportedBroker: the broker cannot store keys, and ``native_delay_store`` is not
                set. Nothing was sent.
        """
        mark = _mark_of("debounce", signature, key)
        quiet_us, longest_us = periods_us(seconds, max_wait_seconds)
        _refuse_times(signature)
        call = partial(rules.debounce, quiet_us=quiet_us, longest_us=longest_us)
        if collect is None:
            return self._publish(mark, call, signature, announce=announce)
        check_collect(collect)
        call = partial(call, most_calls=collect, call_id=uuid())
        its_call, merge = _collecting(self._app, signature), partial(_collected, self._app)
        return self._publish(mark, call, its_call, announce=announce, collect=merge)

    def throttle(
        self,
        signature: Signature,
        *,
        key: str,
        seconds: float,
        edge: Edge = "leading",
        announce: bool = False,
    ) -> KeyedResult:
        """Run a task at most once per *key* within *seconds*.

        Args:
            edge: the calls whose tasks run. The first call begins a period of *seconds*.
                "leading" (the default): the first call's task runs at once. Other calls in the
                period send no task.
                "trailing": the last call's task runs at the end of the period.
                "both": the first call's task runs at once. If more calls follow in the period, the
                last call's task runs at the end of the period, and begins the next period.
            signature, key, announce: as in :meth:`debounce`, which raises the same errors.

        Returns:
            the result of this call's task. If this call sent no task, the result of the first
            call's task. The field *created* of the result is true if this call sent a task. The
            field *replaced* is as in :meth:`debounce`.
        """
        window_us = microseconds("seconds", seconds)
        check_word("edge", edge, Edge)
        _refuse_times(signature)
        if edge == "both" and signature.options.get("task_id") is not None:
            raise TypeError(
                "expected a signature without task_id: with edge='both' the first and the last "
                "call's tasks both run, each under an id of its own"
            )
        if edge == "trailing":
            mark = _mark_of("throttle-trailing", signature, key)
            call: _Call = partial(rules.debounce, quiet_us=window_us, longest_us=window_us)
            return self._publish(mark, call, signature, announce=announce)
        mark = _mark_of("throttle", signature, key)
        call = partial(rules.throttle, window_us=window_us, trails=edge == "both")
        return self._unless_another_stands(mark, call, signature, announce=announce)

    def unique(
        self,
        signature: Signature,
        *,
        key: str,
        countdown: float | None = None,
        eta: datetime | str | None = None,
        until: Until = "end",
    ) -> KeyedResult:
        """Send a task, unless an earlier task with the same *key* is waiting or running.

        With ``until="start"``, only a waiting task prevents the send.

        Args:
            countdown, eta: the due time, as in ``apply_async``.
            until: when the key becomes free for the next task. "end" (the default): when the
                earlier task ends, so that no two tasks run at once. "start": when the earlier task
                starts.
            signature, key: as in :meth:`debounce`, which raises the same errors.

        Returns:
            the result of the task with the key. The field *created* of the result is true if this
            call sent the task.
        """
        mark = _mark_of("unique", signature, key, until)
        check_word("until", until, Until)
        options = signature.options
        if countdown is None and eta is None:
            countdown, eta = options.get("countdown"), options.get("eta")
        call: _Call = rules.unique
        if countdown is not None or eta is not None:
            at_us = due_us(delay_headers(countdown=countdown, eta=eta)["eta"])  # or InvalidDueTime
            call = partial(rules.unique, at_us=at_us)
            if countdown is not None:
                call = partial(rules.unique, wait_us=max(round(countdown * 1_000_000), 0))
        return self._unless_another_stands(mark, call, signature)

    def _standing_id(self, kind: KeyKind, task: str, key: str) -> str | None:
        """Return the id of the last task with this key, which may have run already."""
        check_word("kind", kind, KeyKind)
        _checked(task, key)
        seen: Seen = self._ask_keys(lambda records: records.read(name_of(kind, task, key)))
        return None if seen.record is None else seen.record.id

    def _unless_another_stands(
        self, mark: Mark, call: _Call, signature: Signature, *, announce: bool = False
    ) -> KeyedResult:
        """Publish the task, or return the result of another task that has the key."""
        is_eager = self._task(signature) is not None and self._app.conf.task_always_eager
        if self._has_keys and not is_eager:
            seen = self._ask_keys(lambda records: records.read(mark.name))
            if stands := call(seen, "").stands:
                return self._of_another(signature, stands)
        return self._publish(mark, call, signature, announce=announce)

    def _send_plainly(self, call: _Call, signature: Signature) -> KeyedResult:
        """Send the task without its key, as if no other call had been made."""
        options = dict(signature.options)
        for each in ("countdown", "eta"):  # the rule of the call decides
            options.pop(each, None)
        now_us = time_ns() // 1000
        at_us = call(Seen(now_us, None), "").due_us
        if at_us is not None and at_us > now_us:
            options["eta"] = datetime.fromtimestamp(at_us / 1_000_000, UTC)
        return keyed_result(self._send(signature)(signature.args, signature.kwargs, **options))

    def _send(self, signature: Signature) -> Callable[..., AsyncResult]:
        task = self._task(signature)
        return partial(self._app.send_task, signature.task) if task is None else task.apply_async

    def _publish(
        self,
        mark: Mark,
        call: _Call,
        signature: Signature,
        *,
        announce: bool = False,
        collect: Collect | None = None,
    ) -> KeyedResult:
        task, send = self._task(signature), self._send(signature)
        options = dict(signature.options)
        options["headers"] = {**(options.get("headers") or {}), HEADER: mark.header()}
        if task is not None and self._app.conf.task_always_eager:
            return keyed_result(send(signature.args, signature.kwargs, **options))
        if not self._has_keys:
            return self._send_plainly(call, signature)
        self._check()
        for each in ("countdown", "eta"):  # the channel sets the due time
            options.pop(each, None)
        task_id = options.pop("task_id", None) or uuid()
        publish = publish_under(mark.name, lambda seen: call(seen, task_id), task_id, collect)
        with publishing(publish):
            result = send(signature.args, signature.kwargs, task_id=task_id, **options)
        seen, step = publish.answer
        if step.stands is not None:
            # Our own id: an earlier attempt has published the message, and its answer was lost.
            return self._of_another(signature, step.stands, created=step.stands == task_id)
        known = seen.record if step.replaces else None
        replaced = None if known is None or known.id == task_id else known.id
        if announce and replaced is not None:
            reason = f"replaced by {task_id}"
            revoke_result(self._app, replaced, signature.task, reason=reason)
        return keyed_result(result, replaced=replaced)

    @property
    def _has_keys(self) -> bool:
        """False in an app that delays no new tasks: such an app ignores keys."""
        installation = installation_of(self._app)
        return installation is None or installation.delays_new

    def _check(self) -> None:
        """Raise an error if this app cannot store debounce, throttle and unique keys."""
        if self._is_checked:
            return
        if self._app.conf.task_protocol != 2:
            raise CannotDelay(
                "expected task_protocol = 2: debounce, throttle and unique need its headers"
            )
        self._ask_keys(lambda records: None)
        self._is_checked = True

    def _ask_keys(self, question: Callable[[KeyRecords], Any]) -> Any:
        def ask(connection: Any) -> Any:
            return question(key_records(self._app, connection))

        return ask_on_a_connection(self._app, ask)

    def _task(self, signature: Signature) -> Task | None:
        found: Task | None = self._app.tasks.get(signature.task)
        return found

    def _of_another(
        self, signature: Signature, task_id: str, *, created: bool = False
    ) -> KeyedResult:
        result = (self._task(signature) or self._app).AsyncResult(task_id)
        return keyed_result(result, created=created)


class _Declared(KeyedCalls):
    """Sends tasks whose key is declared, by the app's own ``send_task``."""

    def __init__(self, app: Any, send_task: Callable[..., Any], task: Task | None) -> None:
        super().__init__(app)
        self._send_task, self._sent = send_task, task

    def _send(self, signature: Signature) -> Callable[..., AsyncResult]:
        return partial(self._send_task, signature.task, task_type=self._sent)


def send_declared(
    installation: Any,
    declared: DeclaredKey,
    task: Task | None,
    *,
    name: str,
    args: Any = None,
    kwargs: Any = None,
    task_type: Any = None,
    **options: Any,
) -> KeyedResult | None:
    """Send a task under its declared key; return None if this call has no key."""
    run = getattr(task, "run", None)
    args, kwargs = tuple(args or ()), dict(kwargs or {})
    key = declared.key_of(args, kwargs, options.get("headers") or {}, run)
    if key is None:
        return None
    if options.get("chord") or options.get("group_id"):
        raise CannotDelay(
            f"expected {name}, which has a declared key, outside of a group or chord: it would "
            f"wait for calls whose task never runs. Send it by itself"
        )
    calls = _Declared(installation.app, installation.send_task, task)
    given = {each: value for each, value in options.items() if value is not None}
    signature = Signature(name, args, kwargs, given, app=installation.app)
    its = {name: value for name, value in vars(declared).items() if name != "key"}
    match declared:
        case Debounce():
            return calls.debounce(signature, key=key, **its)
        case Throttle():
            return calls.throttle(signature, key=key, **its)
        case Unique():
            return calls.unique(signature, key=key, **its)
    raise AssertionError(declared)


def key_records(app: Any, connection: Any) -> KeyRecords:
    """Return the ``KeyRecords`` of an app. Raises NoStore without a store."""
    channel, settings = delaying_channel(app, connection)
    return KeyRecords(channel.records(settings))


def _mark_of(kind: str, signature: Any, key: object, until: str | None = None) -> Mark:
    """Check a signature and a key, and make the message header for the key."""
    if isinstance(signature, Task):
        raise TypeError(
            f"expected a signature, got the task itself: write {signature.__name__}.s()"
        )
    if not isinstance(signature, Signature):
        raise TypeError(f"expected the signature of a task such as remind.s(7), got {signature!r}")
    kinds = signature.get("subtask_type")
    if kinds:
        raise TypeError(
            f"expected the signature of a single task, got a {kinds}: a key is for one message; "
            f"send a task that starts the {kinds}"
        )
    return Mark(kind, *_checked(signature.task, key), until)


def _checked(task: str, key: object) -> tuple[str, str]:
    """Return the name of a task, and its key. Raises TypeError or ValueError."""
    if not isinstance(key, str) or not key:
        raise TypeError(f"expected key to be a text such as 'user:7', got {key!r}")
    for what, text in (("key", key), ("task", task)):
        if not is_text(text):
            raise ValueError(
                f"expected {what} to be a text that UTF-8 can encode, got {text!r}: replace its "
                f"lone surrogates, for example by {what}.encode(errors='replace').decode()"
            )
    return task, key


def _refuse_times(signature: Signature) -> None:
    given = [name for name in ("countdown", "eta") if signature.options.get(name) is not None]
    if given:
        raise TypeError(
            f"expected a signature without {given[0]}: the call itself decides when the task runs"
        )


def _collecting(app: Any, signature: Signature) -> Signature:
    """Return the signature of a call whose arguments are collected in ``calls``."""
    if CALLS in signature.kwargs:
        raise TypeError(f"expected a call without the argument {CALLS}, which collects the calls")
    kwargs = {**signature.kwargs, CALLS: [[list(signature.args), dict(signature.kwargs)]]}
    check_signature(app, signature.task, signature.args, kwargs)
    return Signature(signature.task, signature.args, kwargs, signature.options, app=app)


def _collected(app: Any, new: StoreEntry, replaced: Sequence[StoreEntry]) -> StoreEntry:
    """Put the calls that the waiting task has collected before those of the new one."""

    def calls_of(entry: StoreEntry) -> list[Any]:
        args, kwargs, _ = arguments_of(app, entry)
        calls = kwargs.get(CALLS)
        # Otherwise it is of a time without collect, and may have an argument of this name.
        return calls if calls and isinstance(calls, list) else [[args, kwargs]]

    old = args, kwargs, rest = arguments_of(app, new)
    before = max(map(calls_of, replaced), key=len)  # each queue has a copy
    kwargs = {**kwargs, CALLS: [*before, *kwargs[CALLS]]}
    return with_arguments(app, new, old, (args, kwargs, rest))


#: States that a task can still leave. Celery's own revoke overwrites the same states.
_UNREADY = (states.PENDING, states.RECEIVED, states.RETRY, states.REJECTED)


class KeyedResult(AsyncResult):  # type: ignore[misc]  # Celery has no types
    """The result of a debounced, throttled or unique task: an ``AsyncResult`` with two more fields.

    - *created*: True if this call sent the task, False if an earlier call sent the task.
    - *replaced*: the id of the waiting task that this call's task replaced, or None.
    """

    created: bool = True
    replaced: str | None = None

    def __init__(
        self,
        id: str,
        backend: Any = None,
        task_name: str | None = None,
        app: Any = None,
        parent: Any = None,
        created: bool = True,
        replaced: str | None = None,
    ) -> None:
        super().__init__(id, backend, task_name, app, parent)
        self.created = created
        self.replaced = replaced

    def __reduce_args__(self) -> tuple[Any, ...]:
        return (*super().__reduce_args__(), self.created, self.replaced)

    def __copy__(self) -> KeyedResult:
        return keyed_result(super().__copy__(), created=self.created, replaced=self.replaced)


class EagerKeyedResult(EagerResult, KeyedResult):  # type: ignore[misc]
    """A :class:`KeyedResult` of an app with ``task_always_eager``: the task has already run."""


def keyed_result(
    result: AsyncResult, *, created: bool = True, replaced: str | None = None
) -> KeyedResult:
    """Turn Celery's *result* into a :class:`KeyedResult`, without making a new object.

    With results in Redis, a new object would cost a round trip: Celery unsubscribes from the task's
    id when the old object is freed.
    """
    result.__class__ = EagerKeyedResult if isinstance(result, EagerResult) else KeyedResult
    keyed: KeyedResult = result
    keyed.created, keyed.replaced = created, replaced
    return keyed


def revoke_result(app: Any, task_id: str, task_name: str, *, reason: str) -> bool:
    """Set a task's result to REVOKED, with *reason*. Returns False if the result backend fails."""
    registered = app.tasks.get(task_name)
    try:
        backend = app.backend if registered is None else registered.backend
        if not isinstance(backend, DisabledBackend) and backend.get_state(task_id) in _UNREADY:
            backend.mark_as_revoked(task_id, reason=reason, store_result=True)
    except SoftTimeLimitExceeded:
        raise
    except Exception as exc:  # the task itself is cancelled
        text = "native delay: %s is cancelled (%s), but its result is not REVOKED yet: %s"
        logger.warning(text, task_id, reason, described(exc))
        return False
    return True

"""Checks that only Celery and kombu handle the messages that an app publishes.

``bulk(app)`` makes this check before it sends copies of an encoded message.

A method's attributes ``__globals__`` and ``__code__.co_qualname`` show whether the method is a
wrapper, because ``functools.wraps`` does not copy these attributes.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from inspect import getattr_static
from operator import is_
from types import FunctionType, MethodType
from typing import Any

from celery import Task, signals
from celery._state import _task_stack, get_current_worker_task
from celery.app.amqp import AMQP
from celery.app.routes import MapRoute
from kombu import Producer, serialization

from ..app.installation import Installation

_OURS = frozenset(("celery", "kombu"))
_MISSING = object()

#: The methods of each object that are called when a task is published.
_OF_TASK = ("apply_async", "shadow_name", "_get_exec_options", "_get_app", "AsyncResult")
_OF_APP = ("producer_or_acquire", "now", "thread_oid")
_OF_ROUTER = ("route", "expand_destination", "lookup_route", "query_router")
_OF_PRODUCER = ("publish", "_publish", "_prepare", "_delivery_details", "maybe_declare")

#: Attributes of a task that each call of ``apply_async`` reads.
_READ_OF_TASK = ("name", "ignore_result", "time_limit", "soft_time_limit")

_SIGNALS = {
    "before_task_publish": signals.before_task_publish,
    "after_task_publish": signals.after_task_publish,
    "task_sent": signals.task_sent,
}
_before, _after, _sent = _SIGNALS.values()


class PlainPublishing:
    """Finds code outside Celery and kombu that sees or changes an app's published messages."""

    def __init__(self, installation: Installation) -> None:
        self._installation = installation
        self._app = installation.app

    def hooks(self, task: Task | None) -> tuple[Any, ...]:
        """Return the functions that publish *task*, and the state of the publish signals.

        The caller compares two such tuples. The tuples differ if other code has replaced a function
        or connected to a signal.
        """
        # Read the objects' dicts, which is ten times as fast as kombu's cached_property.
        app = self._app
        amqp = vars(app).get("amqp") or app.amqp
        cached = vars(amqp)
        return (
            app.send_task,
            type(app).send_task,
            cached.get("create_task_message") or amqp.create_task_message,
            cached.get("send_task_message") or amqp.send_task_message,
            Producer.publish,
            Producer._publish,
            not _before.receivers,
            not _after.receivers,
            not _sent.receivers,
            get_current_worker_task() if _task_stack.stack else None,
            *(
                (type(task).apply_async, vars(task).get("apply_async"), task.ignore_result)
                if task is not None
                else ()
            ),
        )

    def witness(self, task: Task | None) -> str:
        """Return the reason why ``bulk`` must send *task* by ``apply_async``, or "" if none."""
        found = next(self._witnesses(), "")
        if not found and task is not None:
            found = next(self._witnesses_of(task), "")
        return found

    def _witnesses(self) -> Iterator[str]:
        app, conf, amqp = self._app, self._app.conf, self._app.amqp
        for name, signal in _SIGNALS.items():
            if signal.receivers:
                yield f"{name} has receivers"
            yield from _foreign(signal, ("send",))
        if get_current_worker_task() is not None:
            yield "a task is running here, whose children bear its id"
        for setting, value in (("task_protocol", 2), ("task_serializer", "json")):
            if conf[setting] != value:
                yield f"{setting} is {conf[setting]!r}"
        for setting in ("task_compression", "task_send_sent_event", "task_always_eager"):
            if conf[setting]:
                yield f"{setting} is {conf[setting]!r}"
        json = serialization.registry._encoders.get("json")
        if json is None or not _is_of_module(json.encoder, "kombu.utils.json", "dumps"):
            yield "the serializer json is not kombu's"
        send_task = vars(app)["send_task"]
        if type(send_task) is not MethodType or send_task != self._installation.send_task:
            yield f"{_name(send_task)} stands for the app's send_task"
        if self._installation.earlier_send_task is not None:
            yield f"{_name(self._installation.earlier_send_task)} stands for the app's send_task"
        yield from _foreign(type(app), ("send_task",))
        yield from _foreign(app, _OF_APP)
        as_task, send = amqp.create_task_message, amqp.send_task_message
        if not _is_of(as_task, AMQP, "as_task_v2"):
            yield f"{_name(as_task)} stands for AMQP.as_task_v2"
        if not _is_of(send, AMQP, "_create_task_sender.<locals>.send_task_message"):
            yield f"{_name(send)} stands for AMQP.send_task_message"
        yield from _foreign(amqp.router, _OF_ROUTER)
        for route in (*amqp.routes, *amqp.router.routes):
            if type(route) is not MapRoute:
                yield f"{_name(route)} is a router"
        yield from _foreign(MapRoute, ("__call__",))
        yield from _foreign(Producer, _OF_PRODUCER)

    def _witnesses_of(self, task: Task) -> Iterator[str]:
        if task.app is not self._app:
            yield "the task belongs to another app"
        yield from _foreign(task, _OF_TASK)
        for name in _READ_OF_TASK:
            if hasattr(type(getattr_static(task, name, None)), "__get__"):
                yield f"{name} of the task is computed"
        if getattr(task, "serializer", None) not in (None, "json"):
            yield f"the task's serializer is {task.serializer!r}"
        if getattr(task, "compression", None):
            yield "the task is compressed"
        if task.expires is not None:
            yield "the task expires"
        if getattr(task, "_dump_pydantic_arguments", None) is not None:
            yield "the task's arguments are models"
        if getattr(task, "__self__", None) is not None or task.__v2_compat__:
            yield "the task is a method"
        if not task.ignore_result:
            yield from _foreign(self._app.backend, ("on_task_call",))


def same(hooks: tuple[Any, ...], others: tuple[Any, ...]) -> bool:
    """Return True if both tuples have identical objects (compared with ``is``)."""
    return len(hooks) == len(others) and all(map(is_, hooks, others))


def _foreign(owner: Any, names: tuple[str, ...]) -> Iterator[str]:
    """Yield a text for each method of *owner* that other code has replaced."""
    is_class = isinstance(owner, type)
    for name in names:
        if not is_class and name in vars(owner):
            yield f"{_name(vars(owner)[name])} stands for {type(owner).__name__}.{name}"
        # An overriding method may call the method of a base class.
        for each in (owner if is_class else type(owner)).__mro__:
            found = vars(each).get(name, _MISSING)
            if found is not _MISSING and not _is_of(found, each, name):
                yield f"{_name(found)} stands for {each.__name__}.{name}"


def _is_of(found: Any, owner: type, name: str) -> bool:
    """Return True if *found* is the original method *name* of Celery or kombu."""
    return _is_of_module(found, owner.__module__, f"{owner.__qualname__}.{name}")


def _is_of_module(found: Any, module: str, qualname: str) -> bool:
    function = _function(found)
    return (
        module.partition(".")[0] in _OURS
        and type(function) is FunctionType
        and function.__globals__ is getattr(sys.modules.get(module), "__dict__", None)
        and function.__code__.co_qualname == qualname
    )


def _function(found: Any) -> Any:
    if type(found) in (MethodType, classmethod, staticmethod):
        return found.__func__
    return found.fget if type(found) is property else found


def _name(found: Any) -> str:
    """Return the real dotted name of a function, not a name copied by ``functools.wraps``."""
    function = _function(getattr(found, "_self_wrapper", found))  # for wrappers of wrapt
    if type(function) is FunctionType:
        return f"{function.__globals__.get('__name__')}.{function.__code__.co_qualname}"
    kind = function if isinstance(function, type) else type(function)
    return f"{kind.__module__}.{kind.__qualname__}"

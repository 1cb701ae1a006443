"""Code that sees or changes each publish of an app: then ``bulk(app)`` sends no copies."""

from __future__ import annotations

from celery import Task, signals
from celery._state import _task_stack, get_current_worker_task
from celery.app.routes import MapRoute
from kombu import Producer

from ..app.installation import Installation

_PUBLISH_SIGNALS = (signals.before_task_publish, signals.after_task_publish, signals.task_sent)


def hook_now() -> str:
    """Return what sees or changes each publish at this moment, or "" if nothing does."""
    if any(signal.receivers for signal in _PUBLISH_SIGNALS):
        return "a signal of publishing has receivers"
    within_task = _task_stack.stack and get_current_worker_task() is not None
    return "the running task is the parent of what it sends" if within_task else ""


def hook_of(installation: Installation, task: Task | None) -> str:
    """Return what sees or changes each publish of *task* in this app, or "" if nothing does."""
    app, amqp = installation.app, installation.app.amqp
    functions = [type(app).send_task, app.send_task, installation.earlier_send_task]
    functions += [amqp.create_task_message, amqp.send_task_message]
    functions += [Producer.publish, Producer._publish]
    if task is not None:
        functions += [task.apply_async, task.shadow_name]
    for function in filter(None, functions):
        module = getattr(function, "__module__", None) or ""
        name = f"{module}.{getattr(function, '__qualname__', function)}"
        if hasattr(function, "__wrapped__"):
            return f"{name} is wrapped by other code"
        if module.partition(".")[0] not in ("celery", "kombu", "celery_native_delay"):
            return f"{name} stands for a method of Celery or kombu"
    if any(type(route) is not MapRoute for route in amqp.router.routes):
        return "a router of task_routes is a function or class of your own"
    if task is not None and task.app is not app:
        return "the task belongs to another app"
    settings = [name for name in ("task_compression", "task_send_sent_event") if app.conf[name]]
    serializer = getattr(task, "serializer", None) or app.conf.task_serializer
    settings += [] if serializer == "json" else [f"the serializer {serializer}"]
    return " and ".join(settings)

"""Whether Celery would publish a task as it does by default, so that a template may stand in."""

from __future__ import annotations

from celery import Celery, Task, signals
from celery.app.amqp import AMQP
from celery.app.routes import MapRoute
from kombu import serialization
from kombu.utils import json


def nobody_listens() -> bool:
    """Whether no signal has a receiver that may see, or change, what is published."""
    return not (
        signals.before_task_publish.receivers
        or signals.after_task_publish.receivers
        or signals.task_sent.receivers
    )


def publishes_plainly(app: Celery) -> bool:
    """Whether this app publishes as Celery does by default."""
    conf, amqp = app.conf, app.amqp
    as_task = amqp.task_protocols.get(2)
    json_encoder = serialization.registry._encoders.get("json")
    return (
        conf.task_protocol == 2
        and conf.task_serializer == "json"
        and not conf.task_compression
        and not conf.task_send_sent_event
        and not conf.task_always_eager
        and type(app).send_task is Celery.send_task
        and getattr(as_task, "__func__", None) is AMQP.as_task_v2
        and json_encoder is not None
        and json_encoder.encoder is json.dumps
        and all(isinstance(route, MapRoute) for route in amqp.routes)
        and app.current_worker_task is None
    )


def is_plain(task: Task, app: Celery) -> bool:
    """Whether this task's ``apply_async`` does what Celery's does."""
    return (
        getattr(type(task).apply_async, "__qualname__", "") == "Task.apply_async"
        and getattr(type(task).shadow_name, "__qualname__", "") == "Task.shadow_name"
        and getattr(task, "serializer", None) in (None, "json")
        and not getattr(task, "compression", None)
        and task.expires is None
        and getattr(task, "_dump_pydantic_arguments", None) is None
        and getattr(task, "__self__", None) is None
        and not task.__v2_compat__
        and task.app is app
    )

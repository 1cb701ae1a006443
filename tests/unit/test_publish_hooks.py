"""``bulk()`` sends no copies if a hook, wrapper or override sees the publish of a task."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable
from typing import Any
from unittest.mock import Mock

import celery
import pytest
import wrapt
from celery import Celery, Task, signals
from celery.app.amqp import AMQP
from celery.app.routes import MapRoute
from kombu import Producer

from celery_native_delay import install
from celery_native_delay.app.installation import installed
from celery_native_delay.bulk.kinds import hook_now, hook_of


@pytest.fixture(autouse=True, scope="module")
def no_receivers_of_earlier_tests() -> None:
    """Remove signal receivers of apps that earlier tests have dropped, but Python not yet."""
    gc.collect()


def make_app(app: Celery | None = None, **task_options: Any) -> Celery:
    app = app or Celery("shop", broker="memory://", set_as_current=False)
    app.conf.task_ignore_result = True
    install(app)

    @app.task(name="shop.remind", shared=False, **task_options)
    def remind() -> None:
        """This task is never run."""

    app.finalize()
    return app


def hook_in(app: Celery) -> str:
    return hook_of(installed(app), app.tasks["shop.remind"])


def wrapped(function: Any) -> Any:
    """*function* wrapped as by Sentry: with the name, module and attributes of the original."""

    @functools.wraps(function)
    def watching(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return watching


def wrapped_by_wrapt(function: Any) -> Any:
    """*function* wrapped as by Datadog."""

    def watching(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        return wrapped(*args, **kwargs)

    return wrapt.FunctionWrapper(function, watching)


def replaced(function: Any) -> Any:
    """*function* within another function, which does not tell of it."""
    return lambda *args, **kwargs: function(*args, **kwargs)


WRAPPERS = [wrapped, wrapped_by_wrapt, replaced]


def test_a_plain_app_has_no_hook_and_no_task_of_another() -> None:
    app, other = make_app(), make_app()
    assert (hook_now(), hook_in(app), hook_of(installed(app), None)) == ("", "", "")
    assert hook_of(installed(app), other.tasks["shop.remind"]) == "the task belongs to another app"


@pytest.mark.parametrize("wrap", WRAPPERS)
@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (Task, "apply_async"),
        (Task, "shadow_name"),
        (Celery, "send_task"),
        (AMQP, "as_task_v2"),
        (Producer, "publish"),
        (Producer, "_publish"),
    ],
)
def test_a_wrapped_method_of_a_class_is_found(
    monkeypatch: pytest.MonkeyPatch, owner: type, name: str, wrap: Callable[[Any], Any]
) -> None:
    monkeypatch.setattr(owner, name, wrap(getattr(owner, name)))
    assert (name if wrap is not replaced else __name__) in hook_in(make_app())
    monkeypatch.undo()
    assert hook_in(make_app()) == ""


@pytest.mark.parametrize("wrap", WRAPPERS)
def test_a_wrapped_method_of_an_object_is_found(wrap: Callable[[Any], Any]) -> None:
    """Also one that was wrapped before install(), and a task protocol."""
    app = Celery("shop", broker="memory://", set_as_current=False)
    app.send_task = wrap(app.send_task)
    assert hook_in(make_app(app)) != ""
    for name in ("apply_async", "send_task", "send_task_message"):
        app = make_app()
        found = next(
            each for each in (app, app.amqp, app.tasks["shop.remind"]) if hasattr(each, name)
        )
        setattr(found, name, wrap(getattr(found, name)))
        assert hook_in(app) != "", name
    app = make_app()
    app.amqp.task_protocols[2] = wrap(app.amqp.task_protocols[2])
    assert hook_in(app) != ""


class OwnCelery(Celery):
    def send_task(self, *args: Any, **options: Any) -> Any:
        return super().send_task(*args, **options)


class OwnAMQP(AMQP):
    def as_task_v2(self, *args: Any, **options: Any) -> Any:
        return super().as_task_v2(*args, **options)


class OwnTask(celery.Task):
    def apply_async(self, *args: Any, **options: Any) -> Any:
        return super().apply_async(*args, **options)


#: As in Celery's own documentation; in some projects it even says that it is Celery's.
Namesake = type("Task", (OwnTask,), {"__module__": "celery.app.task"})


#: A subclass that overrides nothing, and a router class of a user.
LaterTask, OwnRoute = type("LaterTask", (OwnTask,), {}), type("OwnRoute", (MapRoute,), {})


@pytest.mark.parametrize(
    ("options", "task_options", "named"),
    [
        ({"main": "shop", "app": OwnCelery}, {}, "OwnCelery.send_task"),
        ({"amqp": OwnAMQP}, {}, "OwnAMQP.as_task_v2"),
        ({"task_cls": OwnTask}, {}, "OwnTask.apply_async"),
        ({"task_cls": Namesake}, {}, "OwnTask.apply_async"),
        ({}, {"base": LaterTask}, "OwnTask.apply_async"),
        ({}, {"shadow_name": wrapped(print)}, "print"),
        ({}, {"serializer": "yaml"}, "the serializer yaml"),
        ({"task_routes": [wrapped(print)]}, {}, "router"),
        ({"task_routes": [OwnRoute({})]}, {}, "router"),
        ({"task_serializer": "yaml"}, {}, "the serializer yaml"),
        ({"task_compression": "gzip"}, {}, "task_compression"),
        ({"task_send_sent_event": True}, {}, "task_send_sent_event"),
    ],
)
def test_an_override_and_a_setting_of_the_users_own_are_found_and_named(
    options: dict[str, Any], task_options: dict[str, Any], named: str
) -> None:
    options = dict(options)
    conf = {name: options.pop(name) for name in list(options) if name in Celery().conf}
    app_class = options.pop("app", Celery)
    app = app_class(**{"broker": "memory://", "set_as_current": False, **options})
    app.conf.update(conf)
    assert named in hook_in(make_app(app, **task_options))


@pytest.mark.parametrize("name", ["before_task_publish", "after_task_publish", "task_sent"])
def test_a_signal_receiver_is_found_at_once(name: str) -> None:
    signal, receive = getattr(signals, name), Mock()
    signal.connect(receive, weak=False)
    assert hook_now() != ""
    signal.disconnect(receive)
    assert hook_now() == ""


@pytest.mark.parametrize("name", ["send_task", "_connection"])
def test_a_method_replaced_later_is_called(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """An APM may start later than the app."""
    app = make_app()
    watching = Mock(side_effect=getattr(Celery, name))
    monkeypatch.setattr(Celery, name, lambda *args, **kwargs: watching(*args, **kwargs))
    app.send_task("shop.remind")
    app.close()
    assert {call.args[0] for call in watching.mock_calls} == {app}

"""``bulk()`` uses templates only if no hook, wrapper or override sees the publish of a task."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable
from typing import Any

import celery
import pytest
import wrapt
from celery import Celery, Task, signals
from celery.app.amqp import AMQP
from celery.app.routes import MapRoute, Router
from celery.backends.base import DisabledBackend
from celery.utils.dispatch import Signal
from kombu import Producer

from celery_native_delay import install
from celery_native_delay.app.installation import installation_of
from celery_native_delay.bulk.plain_publishing import PlainPublishing, same


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


def witness_in(app: Celery) -> str:
    installation = installation_of(app)
    assert installation is not None
    return PlainPublishing(installation).witness(app.tasks["shop.remind"])


def hooks_of(app: Celery) -> tuple[Any, ...]:
    installation = installation_of(app)
    assert installation is not None
    return PlainPublishing(installation).hooks(app.tasks["shop.remind"])


def wrapped(function: Any) -> Any:
    """*function* wrapped as by an APM: with the name, module and attributes of the original."""

    @functools.wraps(function)
    def watching(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return watching


def wrapped_by_wrapt(function: Any) -> Any:
    def watching(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        return wrapped(*args, **kwargs)

    return wrapt.FunctionWrapper(function, watching)


def test_a_plain_app_has_no_customization() -> None:
    assert witness_in(make_app()) == ""


@pytest.mark.parametrize("wrap", [wrapped, wrapped_by_wrapt])
@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (Task, "apply_async"),
        (Task, "shadow_name"),
        (Task, "_get_exec_options"),
        (Task, "AsyncResult"),
        (Celery, "send_task"),
        (Celery, "producer_or_acquire"),
        (Celery, "now"),
        (AMQP, "as_task_v2"),
        (Router, "route"),
        (Router, "lookup_route"),
        (MapRoute, "__call__"),
        (Producer, "publish"),
        (Producer, "_publish"),
        (Producer, "_prepare"),
        (Producer, "maybe_declare"),
        (Signal, "send"),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_a_wrapped_method_of_a_class_is_found_and_named(
    monkeypatch: pytest.MonkeyPatch, owner: type, name: str, wrap: Callable[[Any], Any]
) -> None:
    """A wrapper is found if it is older than the app, and if it comes later."""
    app = make_app()
    before = hooks_of(app)
    monkeypatch.setattr(owner, name, wrap(getattr(owner, name)))
    assert f"{wrap.__name__}.<locals>.watching" in witness_in(make_app())
    if name in ("apply_async", "send_task", "publish", "_publish"):
        assert not same(hooks_of(app), before)
    monkeypatch.undo()
    assert witness_in(make_app()) == ""
    assert same(hooks_of(app), before)


@pytest.mark.parametrize("wrap", [wrapped, wrapped_by_wrapt])
@pytest.mark.parametrize("owner", ["task", "app", "amqp"])
def test_a_wrapped_method_of_an_object_is_found_and_named(
    owner: str, wrap: Callable[[Any], Any]
) -> None:
    app = make_app()
    found, name = {
        "task": (app.tasks["shop.remind"], "apply_async"),
        "app": (app, "send_task"),
        "amqp": (app.amqp, "send_task_message"),
    }[owner]
    before = hooks_of(app)
    setattr(found, name, wrap(getattr(found, name)))
    assert f"{wrap.__name__}.<locals>.watching" in witness_in(app)
    assert not same(hooks_of(app), before)


def test_a_method_wrapped_before_install_is_found_and_named() -> None:
    app = Celery("shop", broker="memory://", set_as_current=False)
    app.send_task = wrapped(app.send_task)
    assert "wrapped.<locals>.watching" in witness_in(make_app(app))


@pytest.mark.parametrize("wrap", [wrapped, wrapped_by_wrapt])
def test_a_replaced_task_protocol_is_found_and_named(wrap: Callable[[Any], Any]) -> None:
    app = make_app()
    app.amqp.task_protocols[2] = wrap(app.amqp.task_protocols[2])
    assert f"{wrap.__name__}.<locals>.watching stands for AMQP.as_task_v2" in witness_in(app)


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


class LaterTask(OwnTask):
    """A subclass that overrides nothing."""


class ComputedTask(celery.Task):
    @property
    def ignore_result(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("options", "task_options", "named"),
    [
        ({"main": "shop", "app": OwnCelery}, {}, "OwnCelery.send_task"),
        ({"amqp": OwnAMQP}, {}, "OwnAMQP.as_task_v2"),
        ({"task_cls": OwnTask}, {}, "OwnTask.apply_async"),
        ({"task_cls": Namesake}, {}, "OwnTask.apply_async"),
        ({}, {"base": LaterTask}, "OwnTask.apply_async"),
        ({}, {"shadow_name": wrapped(print)}, "shadow_name"),
        ({}, {"base": ComputedTask}, "ignore_result of the task is computed"),
        ({}, {"serializer": "yaml"}, "serializer"),
        ({}, {"compression": "gzip"}, "compressed"),
        ({}, {"expires": 60}, "expires"),
        ({"task_routes": [wrapped(print)]}, {}, "is a router"),
        ({"task_serializer": "yaml"}, {}, "task_serializer is 'yaml'"),
        ({"task_send_sent_event": True}, {}, "task_send_sent_event is True"),
    ],
    ids=[
        "own Celery",
        "own AMQP",
        "own Task",
        "own Task of the same name",
        "base",
        "shadow_name",
        "computed",
        "serializer",
        "compression",
        "expires",
        "router",
        "task_serializer",
        "task_send_sent_event",
    ],
)
def test_an_override_of_the_users_own_is_found_and_named(
    options: dict[str, Any], task_options: dict[str, Any], named: str
) -> None:
    options = dict(options)
    conf = {name: options.pop(name) for name in list(options) if name in Celery().conf}
    app_class = options.pop("app", Celery)
    app = app_class(**{"broker": "memory://", "set_as_current": False, **options})
    app.conf.update(conf)
    assert named in witness_in(make_app(app, **task_options))


def test_a_router_of_another_class_is_found() -> None:
    class Route(MapRoute):
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            return super().__call__(*args, **kwargs)

    app = Celery("shop", broker="memory://", set_as_current=False)
    app.conf.task_routes = [Route({})]
    assert "Route is a router" in witness_in(make_app(app))


def test_a_backend_that_is_called_for_each_task_is_found() -> None:
    class Backend(DisabledBackend):
        def on_task_call(self, *args: Any) -> None:
            """Counts."""

    app = Celery("shop", broker="memory://", set_as_current=False)
    app._backend = Backend(app=app)
    assert "Backend.on_task_call" in witness_in(make_app(app, ignore_result=False))


@pytest.mark.parametrize("name", ["before_task_publish", "after_task_publish", "task_sent"])
def test_a_signal_receiver_is_found_at_once(name: str) -> None:
    app, signal = make_app(), getattr(signals, name)
    before = hooks_of(app)

    def receive(**_: Any) -> None:
        """Listens."""

    signal.connect(receive)
    try:
        assert witness_in(app) == f"{name} has receivers"
        assert not same(hooks_of(app), before)
    finally:
        signal.disconnect(receive)
    assert same(hooks_of(app), before)


@pytest.mark.parametrize("name", ["send_task", "_connection"])
def test_a_method_replaced_after_install_is_called(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """An APM may start later than the app."""
    app = make_app()
    called = []
    original = getattr(Celery, name)

    def watching(self: Celery, *args: Any, **kwargs: Any) -> Any:
        called.append(self)
        return original(self, *args, **kwargs)

    monkeypatch.setattr(Celery, name, watching)
    app.send_task("shop.remind")
    app.close()
    assert set(called) == {app}

"""``install(app)`` changes one app, at any time, and no other app."""

from __future__ import annotations

import json
import logging
import math
import pickle
from dataclasses import replace
from functools import partial
from types import ModuleType
from typing import Any
from unittest.mock import Mock

import celery.app.base
import pytest
from celery import Celery, signals
from celery.app.control import Control
from celery.local import Proxy
from kombu import Queue

from celery_native_delay import (
    Delay,
    DelaySettings,
    DelayTooLong,
    InvalidDueTime,
    SettingsError,
    UnsupportedBroker,
    install,
)
from celery_native_delay.app.broker import bounded_connection
from celery_native_delay.app.install import BOOTSTEP, RevokesWaiting
from celery_native_delay.app.installation import installation_of, keep_celerys_own_off
from celery_native_delay.transports.aliases import OPTION, settings_from_option


def plain_app(**configuration: Any) -> Celery:
    app = Celery("proj", broker="amqp://nowhere", set_as_current=False)
    if configuration:
        app.conf.update(configuration)
    return app


def asked_by(app: Celery) -> DelaySettings | None:
    """The settings in the transport options of *app*'s connections; None if there are none.

    Raises:
        SettingsError: they cannot be understood; the connection itself was made all the same.
    """
    option = app.connection_for_write().transport_options.get(OPTION)
    assert app.connection_for_read().transport_options.get(OPTION) == option
    return None if option is None else settings_from_option(option)


# ---- once, before or after -----------------------------------------------------------------


def test_install_returns_the_app_and_installing_again_only_adds_settings() -> None:
    app = plain_app()
    assert install(app, levels=12) is app
    wrapped = app._connection, app.send_task, installation_of(app)
    fixups = set(app.fixups)
    proxy = Proxy(lambda: app)
    assert install(proxy, fused_bits=4) is proxy
    assert (app._connection, app.send_task, installation_of(app)) == wrapped
    assert installation_of(proxy) is installation_of(app) is not None
    assert set(app.fixups) == fixups
    assert list(app.steps["consumer"]).count(BOOTSTEP) == 1
    assert asked_by(app) == DelaySettings(levels=12, fused_bits=4)


def test_each_connection_has_our_option_whenever_its_pool_or_other_options_were_made() -> None:
    app = plain_app()
    options = app.producer_pool.connections.connection.transport_options
    assert OPTION not in {**options, **app.pool.connection.transport_options}
    install(app)
    assert OPTION in app.producer_pool.connections.connection.transport_options
    assert OPTION in app.pool.connection.transport_options
    app.conf.broker_transport_options = {"confirm_publish": True}
    assert set(app.connection_for_write().transport_options) == {"confirm_publish", OPTION}
    assert app.conf.broker_transport_options == {"confirm_publish": True}
    connection = app.connection_for_write(transport_options={"max_retries": 3})
    assert set(connection.transport_options) == {"max_retries", "confirm_publish", OPTION}


def test_our_transport_option_is_json_and_shows_no_password() -> None:
    """`celery inspect stats` shows the transport options."""
    store, url = "postgresql+psycopg://shop:secret@db/shop", "http://u:secret@host"
    app = install(plain_app(), landing=["news"], management_url=url, store=store)
    text = json.dumps(app.connection_for_write().transport_options)
    assert "news" in text
    assert "postgresql+psycopg://shop:**@db/shop" in text
    assert "secret" not in text
    assert asked_by(app) == DelaySettings(landing=("news",), store=store)


# ---- where settings come from --------------------------------------------------------------


PLAIN = {"native_delay_levels": 12, "native_delay_landing": ("news",)}
NAMESPACED = {f"CELERY_{name.upper()}": value for name, value in PLAIN.items()}


@pytest.mark.parametrize(
    ("configuration", "options"),
    [(PLAIN, {}), (NAMESPACED, {"namespace": "CELERY"}), (NAMESPACED, {"namespace": "CELERY_"})],
)
@pytest.mark.parametrize("keywords", [{}, {"levels": 20}], ids=["", "keywords win"])
def test_settings_from_a_configuration_read_before_or_after_install(
    configuration: Any, options: dict[str, Any], keywords: dict[str, int]
) -> None:
    before = install(plain_app(), **keywords)
    before.config_from_object(configuration, **options)
    after = plain_app()
    after.config_from_object(configuration, **options)
    install(after, **keywords)
    expected = DelaySettings(**{"levels": 12, "landing": ("news",), **keywords})
    assert asked_by(before) == asked_by(after) == expected
    assert asked_by(pickle.loads(pickle.dumps(before))) == expected
    before.conf.native_delay_levels, before.conf.native_delay_fused_bits = 12, 4
    assert asked_by(before) == replace(expected, fused_bits=4)


# ---- mistakes ------------------------------------------------------------------------------


def test_a_wrong_keyword_is_refused_and_nothing_installed() -> None:
    app = plain_app()
    with pytest.raises(SettingsError, match=r"expected native_delay_declare to be .* got 0"):
        install(app, declare=0)
    assert installation_of(app) is None


def test_an_error_in_the_configuration_raises_at_each_delayed_message_until_corrected() -> None:
    """Immediate tasks can still be sent: the connection keeps the error until a task is delayed."""
    app = install(plain_app(native_delay_enabled="no"))
    assert app.connection_for_write().transport_options[OPTION]
    with pytest.raises(SettingsError, match="expected native_delay_enabled to be True, False or"):
        asked_by(app)
    app.conf.native_delay_enabled = True
    assert asked_by(app) == DelaySettings()


@pytest.mark.parametrize(
    ("countdown", "error"),
    [(math.nan, InvalidDueTime), (math.inf, InvalidDueTime), (10**10, DelayTooLong)],
)
def test_an_impossible_countdown_is_refused_before_celery_computes_an_eta(
    countdown: float, error: type[Exception]
) -> None:
    app = install(plain_app())

    @app.task(name="t", shared=False)  # else every later app of this process gets it
    def task() -> None: ...

    for send in (partial(app.send_task, "t"), task.apply_async, task.s().apply_async):
        with pytest.raises(error, match=r"3106 d 21 h"):
            send(countdown=countdown)


# ---- methods that the user's classes override ----------------------------------------------


class Narrow(Celery):  # type: ignore[misc]
    """An app whose methods take what Celery's own callers pass, and nothing more by position."""

    sent: tuple[Any, ...] = ()

    def send_task(self, name: str, args: Any = None, kwargs: Any = None, **options: Any) -> Any:
        self.sent = (name, args, kwargs, options)
        return super().send_task(name, args, kwargs, **options)

    def _connection(self, url: Any, **options: Any) -> Any:
        return super()._connection(url, **options)

    def _task_from_fun(self, fun: Any, **options: Any) -> Any:
        return super()._task_from_fun(fun, **options)


def test_an_apps_own_methods_get_the_arguments_of_their_callers() -> None:
    """An app class may narrow the signatures of Celery's methods: install() adds no argument."""
    app = install(Narrow("proj", broker="memory://", set_as_current=False))

    @app.task(name="t", shared=False)
    def task() -> None: ...

    task.delay()
    assert app.sent[0] == "t"
    task.apply_async(countdown=60, queue="narrow")
    assert app.sent[3]["countdown"] == 60
    app.send_task("t", kwargs={"a": 1})
    assert app.sent == ("t", None, {"a": 1}, {})
    with pytest.raises(DelayTooLong):
        app.send_task("t", countdown=10**10)


def test_a_countdown_by_position_is_checked_and_passed_on() -> None:
    app = install(memory_app("unit-position"))
    with pytest.raises(DelayTooLong):
        app.send_task("t", None, None, 10**10)
    app.send_task("t", None, None, 60)
    with app.connection_for_read() as connection, connection.SimpleQueue("unit-position") as queue:
        assert queue.get_nowait().headers["eta"]


# ---- Flask's pattern -----------------------------------------------------------------------


class Late(Celery):  # type: ignore[misc]
    """An app that Flask's ``init_app`` initialises again, after ``install``."""

    def init_app(self, **options: Any) -> None:
        super().__init__("late", broker="memory://", set_as_current=False, **options)


def by_worker(app: Celery) -> None:
    signals.worker_init.send(sender=Mock(app=app))


@pytest.mark.parametrize("again", [install, by_worker])
def test_an_app_that_was_initialised_again_is_completed(again: Any) -> None:
    """A worker completes it by itself: else no due task would reach its queue."""
    app = install(Late(set_as_current=False), levels=20)
    app.init_app(control=OwnControl)
    again(app)
    again(app)
    assert list(app.steps["consumer"]).count(BOOTSTEP) == 1
    assert isinstance(app.control, RevokesWaiting)
    assert isinstance(app.control, OwnControl)
    assert len(app.on_after_finalize.receivers) == 1
    for each in (app, pickle.loads(pickle.dumps(app))):
        assert installation_of(each).settings() == DelaySettings(levels=20)


# ---- pickled apps --------------------------------------------------------------------------


class OwnControl(Control):  # type: ignore[misc]
    """A control class of the user's own, which takes what Celery's callers pass, and no more."""

    def __init__(self, app: Any) -> None:
        super().__init__(app)
        self.heard: list[tuple[str, dict[str, Any]]] = []

    def broadcast(self, command: str, **options: Any) -> None:
        self.heard.append((command, options))


def test_a_pickled_app_is_installed_again_with_configuration_keywords_and_control() -> None:
    """The methods of the user's own control class are still called."""
    app = Celery("proj", broker="memory://", set_as_current=False, control=OwnControl)
    app.config_from_object({"native_delay_levels": 12, "native_delay_fused_bits": 4})
    assert isinstance(app.control, OwnControl)
    install(install(app), levels=20)
    once = pickle.loads(pickle.dumps(app))
    for each in (app, once, pickle.loads(pickle.dumps(once))):
        assert installation_of(each).settings() == DelaySettings(levels=20, fused_bits=4)
        assert list(each.steps["consumer"]).count(BOOTSTEP) == 1
        assert celery.app.base.detect_quorum_queues(with_quorum_queue(each), "amqp") == (False, "")
        assert isinstance(each.control, OwnControl)
        assert type(each.control).__mro__.count(RevokesWaiting) == 1
        each.control.revoke("task-1")
        each.control.broadcast("own")
        (revoke, options), own = each.control.heard
        assert (revoke, options["arguments"]["task_id"]) == ("revoke", "task-1")
        assert own == ("own", {})


def test_a_keyword_is_pickled_although_the_app_was_configured_again_later() -> None:
    app = Celery("proj", broker="memory://", set_as_current=False)
    assert app.conf.broker_url == "memory://"
    install(app, levels=20)
    app.config_from_object({"native_delay_levels": 12})
    for each in (app, pickle.loads(pickle.dumps(app))):
        assert installation_of(each).settings() == DelaySettings(levels=20)


# ---- other apps, and switched off ----------------------------------------------------------


def with_quorum_queue(app: Celery) -> Celery:
    app.conf.task_queues = [Queue("quorum", queue_arguments={"x-queue-type": "quorum"})]
    return app


def test_another_app_of_the_process_is_unchanged() -> None:
    other = with_quorum_queue(plain_app())
    install(with_quorum_queue(plain_app()))
    by_worker(other)
    assert installation_of(other) is None
    assert asked_by(other) is None
    assert BOOTSTEP not in other.steps["consumer"]
    assert not isinstance(other.control, RevokesWaiting)
    assert "send_task" not in vars(other)
    assert "_connection" not in vars(other)
    assert celery.app.base.detect_quorum_queues(other, "amqp") == (True, "quorum")


def test_the_worker_still_detects_quorum_queues_for_its_qos() -> None:
    """Quorum queues have no global QoS; Celery calls the same function for its own delays."""
    import celery.worker.consumer.delayed_delivery
    import celery.worker.consumer.tasks

    import celery_native_delay.worker.bootsteps  # noqa: F401, a worker loads it

    app = install(with_quorum_queue(plain_app()))
    consumer = celery.worker.consumer
    assert celery.app.base.detect_quorum_queues(app, "amqp") == (False, "")
    assert consumer.tasks.detect_quorum_queues(app, "amqp") == (True, "quorum")
    assert consumer.delayed_delivery.detect_quorum_queues(app, "amqp") == (False, "")


def test_a_celery_without_that_function_is_refused() -> None:
    with pytest.raises(UnsupportedBroker, match=r"expected celery\.elsewhere\.detect_quorum_queu"):
        keep_celerys_own_off(ModuleType("celery.elsewhere"))


def test_with_enabled_false_the_app_behaves_as_without_install() -> None:
    namespaced = install(plain_app())
    namespaced.config_from_object({"CELERY_NATIVE_DELAY_ENABLED": False}, namespace="CELERY")
    for app in (install(plain_app(), enabled=False), namespaced):
        with_quorum_queue(app)
        assert asked_by(app) is None
        assert app.connection_for_write().transport_options == {}
        assert celery.app.base.detect_quorum_queues(app, "amqp") == (True, "quorum")
    draining = with_quorum_queue(install(plain_app(), enabled="drain"))
    assert celery.app.base.detect_quorum_queues(draining, "amqp") == (True, "quorum")


def test_with_enabled_false_delay_ls_raises() -> None:
    """The error names the setting and does not claim that the broker delays by itself."""
    with pytest.raises(
        UnsupportedBroker, match=r'is off in this app.*native_delay_enabled = "drain"'
    ):
        Delay(install(memory_app("unit-off"), enabled=False)).ls()


# ---- other brokers -------------------------------------------------------------------------


def memory_app(queue: str) -> Celery:
    return Celery(
        "proj", broker="memory://", set_as_current=False, changes={"task_default_queue": queue}
    )


def test_an_unsupported_broker_warns_once_and_works(caplog: pytest.LogCaptureFixture) -> None:
    app = install(memory_app("unit-warns"))
    with caplog.at_level(logging.WARNING, "celery_native_delay"):
        app.send_task("t", countdown=60)
        app.send_task("t")
        app.connection_for_read()
    ours = [record for record in caplog.records if record.name.startswith("celery_native_delay")]
    (said,) = (record.getMessage() for record in ours)
    assert said.startswith("delayed tasks wait in the memory of workers, as in Celery: ")
    assert "set native_delay_store to the URL of a database" in said
    with app.connection_for_read() as connection, connection.SimpleQueue("unit-warns") as queue:
        delayed, immediate = queue.get_nowait(), queue.get_nowait()
        assert delayed.headers["eta"]
        assert not immediate.headers["eta"]


@pytest.mark.parametrize(
    ("transport", "urls"),
    [
        ("kombu.transport.pyamqp:SSLTransport", "amqp://"),
        ("kombu.transport.redis:Transport", "starts with redis://, rediss://"),
    ],
)
def test_a_foreign_transport_is_refused_with_the_remedy(transport: str, urls: str) -> None:
    app = install(plain_app(broker_transport=transport))
    with pytest.raises(UnsupportedBroker) as refused:
        app.connection_for_write()
    for said in (repr(transport), urls, "broker_transport", "native_delay_enabled = False"):
        assert said in str(refused.value)
    app.conf.native_delay_enabled = False
    assert asked_by(app) is None


def test_the_users_own_timeouts_have_precedence() -> None:
    app = install(Celery(broker="redis://127.0.0.1:1", set_as_current=False))
    app.conf.broker_transport_options = {"socket_timeout": 60}
    options = bounded_connection(app).transport_options
    assert (options["socket_timeout"], options["socket_connect_timeout"]) == (60, 5)
    assert "socket_connect_timeout" not in app.connection_for_write().transport_options

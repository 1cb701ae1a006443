"""Ways to configure app and broker: delayed tasks run on time, or one sentence says why not."""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable
from time import time
from typing import Any

import pytest
from celery import Celery
from celery.contrib.testing.worker import start_worker
from kombu import Connection

from celery_native_delay import (
    DelayTooLong,
    InvalidDueTime,
    NotPermitted,
    SettingsError,
    TopologyMismatch,
    install,
)
from celery_native_delay.testing import PrivateRabbitMQ, PrivateRedis
from tests.acceptance.worker import FEW_LEVELS, Fleet, Worker, fleet_on
from tests.brokers import on_one_version
from tests.rabbitmqs import private_rabbitmq
from tests.waiting import wait_until

OUR_NAMES = "celery_delay."


def send_and_wait(
    fleet: Fleet,
    app: Celery,
    *,
    countdown: float = 1,
    **options: Any,
) -> None:
    """A delayed task runs once and on time."""
    before = time()
    result = app.send_task("note", ("x",), countdown=countdown, **options)
    after = time()
    (run,) = fleet.record.wait_for(task_id=result.id)
    run.assert_on_time(before + countdown, after + countdown)


def run_now(fleet: Fleet, app: Celery) -> None:
    """An immediate task runs."""
    fleet.record.wait_for(task_id=app.send_task("note", ("now",)).id)


def levels(rabbitmq: PrivateRabbitMQ, vhost: str, namespace: str = OUR_NAMES) -> int:
    """The number of messages in delay levels, as the management API last counted them."""
    queues = rabbitmq.queues(vhost)
    return sum(q.get("messages", 0) for q in queues if q["name"].startswith(namespace))


# ---- several apps ---------------------------------------------------------------------------


@on_one_version
@pytest.mark.ci
def test_two_namespaces_on_one_vhost_are_separate(
    fleet: Fleet, rabbitmq: PrivateRabbitMQ, vhost: str
) -> None:
    """Tasks of each namespace wait in its own levels; a worker of either namespace runs both."""
    red, blue = (fleet.app(native_delay_namespace=name) for name in ("red", "blue"))
    fleet.worker(native_delay_namespace="blue")
    red.send_task("note", ("x",), countdown=600)

    def red_waits() -> bool:
        return levels(rabbitmq, vhost, "red.") == 1 and levels(rabbitmq, vhost, "blue.") == 0

    wait_until(red_waits)
    for app in (red, blue):
        send_and_wait(fleet, app)
        send_and_wait(fleet, app, queue="side")


SETTINGS: dict[str, dict[str, Any]] = {
    "another namespace": {"native_delay_namespace": "other"},
    "a landing exchange": {"native_delay_landing": ["shop"]},
}


@on_one_version
@pytest.mark.ci
def test_one_worker_serves_producers_with_different_settings(fleet: Fleet) -> None:
    """One worker runs the tasks of producers with different settings and sets of levels."""
    fleet.worker()
    sent = {}
    for name, conf in SETTINGS.items():
        app = fleet.app(**conf)
        for route in ({}, {"exchange": "shop", "routing_key": "orders.new"}):
            before = time()
            result = app.send_task("note", (name,), countdown=1.5, **route)
            sent[result.id] = before, time()
    runs = fleet.record.wait_for_ids(list(sent))
    for task_id, (before, after) in sent.items():
        (run,) = runs[task_id]
        run.assert_on_time(before + 1.5, after + 1.5)


# ---- connections ----------------------------------------------------------------------------


@on_one_version
@pytest.mark.ci
def test_separate_read_and_write_urls(fleet: Fleet, rabbitmq: PrivateRabbitMQ, vhost: str) -> None:
    """Separate read and write URLs with two users; the worker may also put early tasks back."""
    read = rabbitmq.add_user("reader", "r", vhost=vhost)
    write = rabbitmq.add_user("writer", "w", vhost=vhost)
    fleet.conf |= {"broker_read_url": read, "broker_write_url": write}
    fleet.broker_url = "amqp://nobody:nothing@127.0.0.1:1//"
    fleet.worker()
    app = fleet.app()
    send_and_wait(fleet, app)
    send_and_wait(fleet, app, queue="side")
    result = app.send_task("again", (2, 0.3), countdown=0.3)
    assert len(fleet.record.wait_for(3, task_id=result.id)) == 3
    early = fleet.produce("print(app.tasks['note'].apply_async(('x',), countdown=3).id)").strip()
    (run,) = fleet.record.wait_for(task_id=early)
    assert run.due is not None
    run.assert_on_time(run.due)


@on_one_version
@pytest.mark.ci
def test_a_failover_to_another_broker(
    rabbitmq: PrivateRabbitMQ, rabbitmq_version: str, vhost_url: str, tmp_path: Any
) -> None:
    """Producer and worker switch to the second URL of the list and prepare that broker."""
    with private_rabbitmq(version=rabbitmq_version, management=False) as first:
        urls = f"{first.url};{vhost_url}"
        with fleet_on(urls, tmp_path, native_delay_levels=FEW_LEVELS) as fleet:
            worker = fleet.worker(broker_connection_timeout=2)
            app = fleet.app(broker_connection_timeout=2)
            send_and_wait(fleet, app)
            first.kill()
            # The worker may need a while to come over; the task waits for it.
            send_and_wait(fleet, app)
            worker.wait_for_log("native delay:", "declared in")
            send_and_wait(fleet, app, queue="side")


@on_one_version
def test_a_connection_that_the_user_created(fleet: Fleet) -> None:
    """`apply_async(connection=…)` and `producer=…` with objects that the user created."""
    fleet.worker()
    app = fleet.app()
    with app.connection_for_write() as connection:
        send_and_wait(fleet, app, connection=connection)
        with app.amqp.Producer(connection) as producer:
            send_and_wait(fleet, app, producer=producer)


# ---- the moment of install ------------------------------------------------------------------


def used_before_install(fleet: Fleet) -> Celery:
    """An app used before `install()`: its pools hold connections that cannot delay."""
    app = fleet.app(installed=False)
    run_now(fleet, app)
    return install(app)


def configured_late(fleet: Fleet) -> Celery:
    app = install(Celery("late", set_as_current=False))
    app.config_from_object(
        {"broker_url": fleet.broker_url, "task_default_queue": "default", "result_backend": None}
    )
    return app


def configured_late_with_namespace(fleet: Fleet) -> Celery:
    """An app configured after `install()` with a namespace, as Django projects do."""
    app = install(Celery("late", set_as_current=False))
    app.config_from_object(
        {
            "CELERY_BROKER_URL": fleet.broker_url,
            "CELERY_TASK_DEFAULT_QUEUE": "default",
            "CELERY_BROKER_TRANSPORT_OPTIONS": {"client_properties": {"shop": "7"}},
            "CELERY_NATIVE_DELAY_RESOLUTION": 0.25,
        },
        namespace="CELERY",
    )
    return app


def pickled(fleet: Fleet) -> Celery:
    copy: Celery = pickle.loads(pickle.dumps(fleet.app()))
    return copy


def installed_twice(fleet: Fleet) -> Celery:
    return install(install(fleet.app(), resolution=0.25), levels=20)


APPS: list[Callable[[Fleet], Celery]] = [
    used_before_install,
    configured_late,
    configured_late_with_namespace,
    pickled,
    installed_twice,
]


@on_one_version
@pytest.mark.ci
def test_install_at_any_time_in_an_apps_life(
    fleet: Fleet, rabbitmq: PrivateRabbitMQ, vhost: str
) -> None:
    """Each of these apps delays its tasks itself; one worker runs them all."""
    worker = fleet.worker()
    for number, make in enumerate(APPS, 1):
        app = make(fleet)
        try:
            app.send_task("note", ("far",), countdown=600)
            send_and_wait(fleet, app)
        finally:
            app.close()

        def all_wait_in_the_levels(number: int = number) -> bool:
            return levels(rabbitmq, vhost) == number

        wait_until(all_wait_in_the_levels)
        # By the producer, not put there by the worker.
        assert worker.log_lines("put", "early task") == [], make


@on_one_version
def test_with_enabled_false_the_worker_holds_the_task(
    fleet: Fleet, rabbitmq: PrivateRabbitMQ, vhost: str
) -> None:
    """Switched off, the worker holds the task, and the package declares no queue or exchange."""
    worker = fleet.worker(native_delay_enabled=False)
    app = fleet.app(native_delay_enabled=False)
    app.send_task("note", ("far",), countdown=600)
    result = app.send_task("note", ("x",), countdown=2)
    inspect = app.control.inspect(destination=[worker.name], timeout=10)

    wait_until(lambda: bool((inspect.scheduled() or {}).get(worker.name)))
    fleet.record.wait_for(task_id=result.id)
    assert [q for q in rabbitmq.queues(vhost) if q["name"].startswith(OUR_NAMES)] == []


# ---- queues and policies --------------------------------------------------------------------


@on_one_version
def test_quorum_task_queues_on_a_topic_exchange(
    fleet: Fleet, rabbitmq: PrivateRabbitMQ, vhost: str
) -> None:
    """Quorum task queues switch Celery's own delayed delivery on, but not for an installed app."""
    fleet.conf["queue_type"] = "quorum"
    worker = fleet.worker()
    app = fleet.app()
    for route in ({}, {"exchange": "shop", "routing_key": "orders.new"}, {"queue": "side"}):
        send_and_wait(fleet, app, **route)
    result = app.send_task("again", (3, 0.3), countdown=0.3, queue="orders")
    assert len(fleet.record.wait_for(4, task_id=result.id)) == 4
    names = [q["name"] for q in rabbitmq.queues(vhost)]
    names += [e["name"] for e in rabbitmq.api("GET", f"/exchanges/{vhost}")]
    assert [name for name in names if "celery_delayed" in name] == []
    assert worker.log_lines("CRITICAL") == []


@on_one_version
def test_a_worker_names_a_policy_that_overrides_the_levels_at_boot(
    fleet: Fleet, rabbitmq: PrivateRabbitMQ, vhost: str
) -> None:
    rabbitmq.set_policy(vhost, "short-lived", ".*", {"message-ttl": 500})
    credentials = rabbitmq.management_url.replace("://", "://guest:guest@")
    worker = fleet.worker(native_delay_management_url=credentials)
    worker.wait_for_log("WARNING", "short-lived", "message-ttl")
    assert len(worker.log_lines("WARNING", "short-lived")) == 1
    assert "guest:guest" not in worker.log


# ---- errors ---------------------------------------------------------------------------------


def worker_without_delay(fleet: Fleet, *reason: str, **conf: Any) -> Worker:
    """A worker that cannot delay: it logs this once, and runs immediate tasks."""
    worker = fleet.worker(**conf)
    assert len(worker.log_lines("CRITICAL")) == 1
    assert worker.log_lines("CRITICAL", "native delay is OFF", *reason)
    return worker


@on_one_version
@pytest.mark.parametrize(
    ("conf", "reason"),
    [
        ({"native_delay_declare": 0}, "expected native_delay_declare to be True or False"),
        ({"native_delay_delcare": 3}, "unknown setting native_delay_delcare; did you mean"),
    ],
)
def test_a_wrong_setting_in_the_configuration(
    fleet: Fleet, conf: dict[str, Any], reason: str
) -> None:
    worker = worker_without_delay(fleet, reason, **conf)
    app = fleet.app(**conf)
    run_now(fleet, app)
    with pytest.raises(SettingsError) as caught:
        app.send_task("note", ("x",), countdown=1)
    assert reason in str(caught.value)
    run_now(fleet, app)
    assert len(worker.log_lines("CRITICAL")) == 1


@on_one_version
def test_a_user_without_permission_to_declare_the_levels(
    fleet: Fleet, rabbitmq: PrivateRabbitMQ, vhost: str
) -> None:
    """The error is one sentence; publishing works once another user has declared the levels."""
    may_all = fleet.app()
    limited = rabbitmq.add_user("limited", "l", configure=r"^(?!celery_delay\.).*", vhost=vhost)
    fleet.broker_url = limited
    worker = worker_without_delay(fleet, "celery -A PROJ delay declare", "access to")
    app = fleet.app()
    run_now(fleet, app)
    with pytest.raises(NotPermitted, match=r"configure, write and read on \^celery_delay"):
        app.send_task("note", ("x",), countdown=1)
    run_now(fleet, app)
    worker.stop()

    may_all.send_task("note", ("declares",), countdown=600)
    worker = fleet.worker()
    assert worker.log_lines("CRITICAL") == []
    send_and_wait(fleet, fleet.app())
    send_and_wait(fleet, fleet.app(), exchange="shop", routing_key="orders.new")


@on_one_version
def test_a_level_queue_that_exists_with_different_arguments(fleet: Fleet) -> None:
    with Connection(fleet.broker_url) as connection:
        connection.default_channel.queue_declare(
            f"{OUR_NAMES}v1.{FEW_LEVELS}x125ms.f0.quorum.level-03",
            durable=True,
            auto_delete=False,
        )
    worker_without_delay(fleet, "celery -A PROJ delay verify", "level-03")
    app = fleet.app()
    run_now(fleet, app)
    with pytest.raises(TopologyMismatch, match="level-03"):
        app.send_task("note", ("x",), countdown=1)
    run_now(fleet, app)


@on_one_version
@pytest.mark.parametrize(
    ("options", "error", "sentence"),
    [
        (
            {"countdown": 10**10},
            DelayTooLong,
            r"115740 d.*longest delay of 3106 d.*celery beat",
        ),
        ({"countdown": math.nan}, InvalidDueTime, "expected a countdown of 0 to .* got nan"),
        ({"countdown": math.inf}, InvalidDueTime, "expected a countdown of 0 to .* got inf"),
        ({"eta": "tomorrow"}, InvalidDueTime, "ISO 8601 .* got 'tomorrow'"),
    ],
)
def test_an_impossible_due_time_is_refused(
    fleet: Fleet, options: dict[str, Any], error: type[Exception], sentence: str
) -> None:
    app = fleet.app(native_delay_levels=31)
    with pytest.raises(error, match=sentence):
        app.send_task("note", ("x",), **options)
    app.send_task("note", ("now",))
    assert fleet.depth("default") == 1


# ---- beat -----------------------------------------------------------------------------------


@on_one_version
def test_a_beat_entry_with_a_countdown(fleet: Fleet) -> None:
    """Beat publishes through the app, so its delayed entries wait in the broker too."""
    entry = {"task": "note", "args": ["beat"], "schedule": 1.0, "options": {"countdown": 1.5}}
    worker = fleet.worker(
        more=("--beat", f"--schedule={fleet.folder}/beat"), beat_schedule={"every-second": entry}
    )
    inspect = fleet.app().control.inspect(destination=[worker.name], timeout=10)
    for run in fleet.record.wait_for(3, name="note"):
        assert run.due is not None
        run.assert_on_time(run.due)
        assert inspect.scheduled() == {worker.name: []}


# ---- Flask's pattern ------------------------------------------------------------------------


class Late(Celery):  # type: ignore[misc]
    def init_app(self, broker_url: str) -> None:
        super().__init__("late", broker=broker_url, set_as_current=False)


def test_a_worker_of_an_app_that_was_initialised_after_install_runs_delayed_tasks(
    empty_redis: PrivateRedis,
) -> None:
    """Flask's ``init_app`` calls ``Celery.__init__`` again, which removes all bootsteps."""
    app = install(Late(set_as_current=False))
    app.init_app(empty_redis.url)
    ran: list[bool] = []

    @app.task(name="note", shared=False)
    def note() -> None:
        ran.append(True)

    with start_worker(app, pool="solo", perform_ping_check=False):
        note.apply_async(countdown=1)
        wait_until(lambda: ran == [True])

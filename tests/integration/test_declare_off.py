"""``native_delay_declare`` off: only `delay declare` declares, and delays work."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from kombu import Connection, Exchange, Queue

from celery_native_delay import DelaySettings, NotDeclared
from celery_native_delay.testing import PrivateRabbitMQ, vhost_name
from celery_native_delay.transports.rabbitmq.topology import Topology
from tests.integration.project import Project
from tests.integration.traffic import (
    TOPOLOGY,
    bodies,
    declare_exchange,
    declare_queue,
    delaying,
    delays_of,
    inbox,
    on_all_versions,
)
from tests.traffic import publish

APP = """
from celery import Celery
from celery_native_delay import install
from kombu import Exchange, Queue

shop = Exchange("shop", type="topic")
app = Celery("shop", broker={url!r}, set_as_current=False)
app.conf.task_default_queue = "orders"
app.conf.task_queues = [
    Queue("orders", shop, routing_key="orders.#"),
    Queue("parcels", shop, routing_key="*.parcel/x.#"),
    Queue("news", Exchange("news", type="fanout")),
    Queue("few", max_length=100, queue_arguments={{"x-overflow": "reject-publish"}}),
]
install(app, **{settings!r})
"""

SMALL = {"levels": 6, "fused_bits": 3, "declare": False}

REMEDY = "run `celery -A PROJ delay declare` as a user who may declare"


@pytest.fixture
def project(tmp_path: Path, rabbitmq: PrivateRabbitMQ) -> Project:
    return Project(tmp_path, SMALL | {"management_url": rabbitmq.management_url})


@pytest.fixture
def shop(project: Project, vhost_url: str) -> Project:
    """An app with native_delay_declare off, on an empty virtual host."""
    return project.write(APP, vhost_url)


def held(rabbitmq: PrivateRabbitMQ, vhost: str) -> set[str]:
    """All exchanges, queues and bindings of a virtual host, with the fields that declaring sets."""
    kept = "name type durable auto_delete arguments source destination destination_type routing_key"
    return {
        json.dumps([kind, {k: item.get(k) for k in kept.split()}], sort_keys=True)
        for kind in ("exchanges", "queues", "bindings")
        for item in rabbitmq.api("GET", f"/{kind}/{vhost}")
    }


@on_all_versions
def test_what_delay_declare_makes_passes_doctor(shop: Project) -> None:
    """Although native_delay_declare is off, which doctor alone does not change."""
    assert shop.told("doctor", status=1)["findings"][0]["remedy"] == REMEDY
    assert shop.delay("declare").returncode == 0
    assert shop.told("doctor")["healthy"] is True


@pytest.mark.ci
def test_delay_declare_makes_at_least_as_much_as_if_native_delay_declare_were_on(
    project: Project, rabbitmq: PrivateRabbitMQ, vhost_url: str, vhost: str
) -> None:
    other = rabbitmq.new_vhost()
    try:
        for url, declare in ((vhost_url, False), (other, True)):
            shop = project.write(APP, url, declare=declare)
            assert shop.delay("declare").returncode == 0
            assert shop.lines("doctor")[-1] == "healthy"
        assert held(rabbitmq, vhost_name(other)) <= held(rabbitmq, vhost)
    finally:
        rabbitmq.delete_vhost(vhost_name(other))


def test_doctor_finds_a_missing_binding(shop: Project, vhost_url: str) -> None:
    """Where workers may not bind it, nothing but `delay declare` does."""
    shop.delay("declare")
    topology = Topology(DelaySettings.from_mapping(SMALL))
    pattern = topology.delivery_pattern("%shop.orders.#")
    with Connection(vhost_url) as stranger:
        stranger.default_channel.queue_unbind("orders", topology.delivery_exchange, pattern)
    (found,) = (f for f in shop.told("doctor", status=1)["findings"] if f["level"] == "wrong")
    assert found["problem"] == f"{topology.delivery_exchange}: not bound to orders with {pattern}"
    assert found["remedy"] == REMEDY
    shop.delay("declare")
    assert shop.told("doctor")["healthy"] is True


def test_delay_declare_binds_queues_with_no_declare_and_names_missing_ones(
    project: Project, vhost_url: str
) -> None:
    source = APP.replace('routing_key="orders.#"', 'routing_key="orders.#", no_declare=True')
    shop = project.write(source, vhost_url)
    done = shop.delay("declare")
    assert done.returncode == 1
    assert "queue 'orders' is missing, and has no_declare: declare it first" in done.stderr
    with Connection(vhost_url) as owner:
        Queue("orders", Exchange("shop", type="topic"), "orders.#")(owner.default_channel).declare()
    assert shop.delay("declare").returncode == 0
    assert shop.told("doctor")["healthy"] is True


@on_all_versions
def test_a_publish_without_levels_names_both_remedies(vhost_url: str) -> None:
    """It declares nothing; delays work as soon as somebody else has declared the levels."""
    with delaying(vhost_url, declare=False) as connection:
        declare_queue(connection, "orders")
        with pytest.raises(NotDeclared, match=rf"{TOPOLOGY.ready_exchange} is missing") as refused:
            publish(connection, "refused", "orders", delay=1)
        assert "delay declare" in str(refused.value)
        assert "native_delay_declare = True" in str(refused.value)
        publish(connection, "immediate", "orders")
        with delaying(vhost_url) as admin:
            declare_queue(admin, "orders")
            delays_of(admin).prepare()
        publish(connection, "later", "orders", delay=0.2)
        with inbox(vhost_url, "orders", declare=False) as letters:
            assert bodies(letters.wait_for(2)) == ["immediate", "later"]


@on_all_versions
def test_a_publish_names_a_deleted_level(vhost_url: str) -> None:
    """Its queue is deleted, or its exchange."""
    level = TOPOLOGY.level_queue(64)  # from 1.28 s on
    with delaying(vhost_url) as admin, delaying(vhost_url, declare=False) as connection:
        declare_queue(admin, "orders")
        delays_of(admin).prepare()
        channel = admin.default_channel
        for delete, name in (
            (channel.queue_delete, level),
            (channel.exchange_delete, f"{level}.entry"),
        ):
            delete(name)
            with pytest.raises(NotDeclared, match=rf"{level}\.entry"):
                publish(connection, "refused", "orders", delay=2.2)
            delays_of(admin).prepare(redeclare=True)
            publish(connection, "later", "orders", delay=2.2)
        with inbox(vhost_url, "orders", declare=False) as letters:
            assert bodies(letters.wait_for(2)) == ["later"] * 2


@on_all_versions
def test_users_declarations_leave_declared_objects_unchanged(
    rabbitmq: PrivateRabbitMQ, vhost_url: str, vhost: str
) -> None:
    """The user declares, binds, unbinds and deletes."""
    with delaying(vhost_url) as admin:
        declare_exchange(admin, "shop", "topic")
        declare_queue(admin, "orders")
        admin.default_channel.queue_bind("orders", "shop", "orders.#")
        delays_of(admin).prepare(consuming=True)

    def ours() -> set[str]:
        return {each for each in held(rabbitmq, vhost) if TOPOLOGY.space in each}

    before = ours()
    with delaying(vhost_url, declare=False) as connection:
        channel = connection.default_channel
        declare_queue(connection, "new")
        declare_exchange(connection, "news", "fanout")
        channel.queue_bind("new", "news")
        publish(connection, "known", "orders.new", exchange="shop", delay=0.1)
        with pytest.raises(NotDeclared, match=r"landing-exchange.*'news'"):
            publish(connection, "refused", "", exchange="news", delay=0.1)
        channel.queue_unbind("orders", "shop", "orders.#")
        channel.exchange_delete("shop")
        assert ours() == before
        with inbox(vhost_url, "orders", declare=False) as letters:
            assert bodies(letters.wait_for(1)) == ["known"]
        channel.queue_delete("orders")
    # With the queue RabbitMQ removes its bindings.
    assert {json.loads(each)[0] for each in before - ours()} <= {"bindings"}


@on_all_versions
def test_a_user_without_configure_permission_delays_to_every_exchange(
    shop: Project, rabbitmq: PrivateRabbitMQ, vhost: str
) -> None:
    """A fanout exchange as well, although its type cannot be asked for."""
    shop.delay("declare")
    limited = rabbitmq.add_user(f"limited-{vhost}", "secret", configure="", vhost=vhost)
    settings = {"namespace": "celery_delay", "resolution": 0.125, **SMALL}
    with delaying(limited, **settings) as connection:
        publish(connection, "by name", "few", delay=0.2)
        publish(connection, "topic", "a.parcel/x.b", exchange="shop", delay=0.2)
        publish(connection, "fanout", "", exchange="news", delay=0.2)
    with inbox(limited, "few", "parcels", "news", **settings) as letters:
        came = {arrival.queue: arrival.body for arrival in letters.wait_for(3)}
    assert came == {"few": "by name", "parcels": "topic", "news": "fanout"}

"""`delay export`: other tools import its definitions, and delays work."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from kombu import Connection

from celery_native_delay import DelaySettings, NotDeclared
from celery_native_delay.testing import PrivateRabbitMQ, vhost_name
from celery_native_delay.transports.rabbitmq.blueprint import export
from celery_native_delay.transports.rabbitmq.topology import Topology
from tests.brokers import on_one_version
from tests.integration.project import Project
from tests.integration.traffic import (
    TOPOLOGY,
    bodies,
    declare_exchange,
    declare_queue,
    delaying,
    delays_of,
    inbox,
    parked_count,
)
from tests.traffic import publish
from tests.unit.test_export import QUEUES
from tests.waiting import wait_until

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

REMEDY = "import what `celery -A PROJ delay export` writes, or set native_delay_declare = True"


@pytest.fixture
def shop(tmp_path: Path, rabbitmq: PrivateRabbitMQ, vhost_url: str) -> Project:
    """An app with native_delay_declare off, on an empty virtual host."""
    settings = SMALL | {"management_url": rabbitmq.management_url}
    return Project(tmp_path, settings).write(APP, vhost_url)


def by_command(rabbitmq: PrivateRabbitMQ, file: Path) -> None:
    """Import by `rabbitmqctl import_definitions`, which may run in a chroot."""
    there = rabbitmq.data_dir / "exported.json"
    there.write_text(file.read_text())
    inside = "/" / there.relative_to(rabbitmq.installation.root)
    rabbitmq.rabbitmqctl("import_definitions", str(inside))
    there.unlink()


def by_api(rabbitmq: PrivateRabbitMQ, file: Path) -> None:
    rabbitmq.api("POST", "/definitions", json.loads(file.read_text()))


BY = pytest.mark.parametrize("imports", [by_command, by_api])


def held(rabbitmq: PrivateRabbitMQ, vhost: str) -> set[str]:
    """All exchanges, queues and bindings of a virtual host, with the fields that declaring sets."""
    kept = (
        *("name", "type", "durable", "auto_delete", "arguments", "source", "destination"),
        *("destination_type", "routing_key"),
    )
    found = set()
    for kind in ("exchanges", "queues", "bindings"):
        for item in rabbitmq.api("GET", f"/{kind}/{vhost}"):
            found.add(json.dumps([kind, {k: item.get(k) for k in kept}], sort_keys=True))
    return found


def exported(shop: Project) -> None:
    """Write the export of *shop* into its folder."""
    (shop.folder / "exported").write_text(shop.delay("export").stdout)


@BY
def test_imported_definitions_pass_verify(
    shop: Project, rabbitmq: PrivateRabbitMQ, imports: Callable[[PrivateRabbitMQ, Path], None]
) -> None:
    """By `rabbitmqctl import_definitions`, and by the management API."""
    told = shop.told("export")
    assert told["left_out"] == []
    (shop.folder / "exported").write_text(told["text"])
    assert shop.told("verify", status=1)["findings"][0]["remedy"] == REMEDY
    imports(rabbitmq, shop.folder / "exported")
    assert shop.told("verify")["healthy"] is True


def test_the_management_api_imports_into_any_virtual_host(
    rabbitmq: PrivateRabbitMQ, vhost: str
) -> None:
    """Posted for one virtual host, or for the host named in the definitions."""
    settings = DelaySettings.from_mapping(SMALL)
    exported = json.loads(export(settings, QUEUES, vhost).text)
    rabbitmq.api("POST", "/definitions", exported)
    other = vhost_name(rabbitmq.new_vhost())
    try:
        rabbitmq.api("POST", f"/definitions/{other}", exported)
        assert held(rabbitmq, other) == held(rabbitmq, vhost)
    finally:
        rabbitmq.delete_vhost(other)
    names = {json.loads(each)[1]["name"] for each in held(rabbitmq, vhost)}
    assert {"orders", Topology(settings).ready_exchange} <= names


@on_one_version
@pytest.mark.ci
def test_the_export_has_everything_that_declare_makes(
    tmp_path: Path, rabbitmq: PrivateRabbitMQ, vhost_url: str, vhost: str
) -> None:
    """With the 64 level queues of the default settings."""
    settings = {"management_url": rabbitmq.management_url, "declare": False}
    shop = Project(tmp_path, settings).write(APP, vhost_url)
    exported(shop)
    by_command(rabbitmq, tmp_path / "exported")
    assert shop.lines("verify")[-1].endswith("as expected")

    other = rabbitmq.new_vhost()
    try:
        shop.write(APP, other, declare=True)
        assert shop.delay("declare").returncode == 0
        declared = held(rabbitmq, vhost_name(other))
    finally:
        rabbitmq.delete_vhost(vhost_name(other))
    assert declared <= held(rabbitmq, vhost)


@on_one_version
def test_verify_finds_a_missing_binding_after_an_import(
    shop: Project, rabbitmq: PrivateRabbitMQ, vhost_url: str, vhost: str
) -> None:
    """Where workers may not bind it, nothing but a new import does."""
    exported(shop)
    by_api(rabbitmq, shop.folder / "exported")
    topology = Topology(DelaySettings.from_mapping(SMALL))
    pattern = topology.delivery_pattern("%shop.orders.#")
    with Connection(vhost_url) as stranger:
        stranger.default_channel.queue_unbind("orders", topology.delivery_exchange, pattern)
    (found,) = (f for f in shop.told("verify", status=1)["findings"] if f["level"] == "wrong")
    assert found["problem"] == f"{topology.delivery_exchange}: not bound to orders with {pattern}"
    assert found["remedy"] == REMEDY


@on_one_version
def test_delay_declare_is_refused_if_native_delay_declare_is_off(
    shop: Project, rabbitmq_version: str
) -> None:
    done = shop.delay("declare")
    assert done.returncode == 1
    assert "native_delay_declare is off" in done.stderr
    assert "delay export" in done.stderr


# ---- without a broker ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "settings", "why"),
    [
        (
            "redis://127.0.0.1:9",
            {},
            "tasks wait there in celery_delay.v2.due, which the first task creates",
        ),
        ("sqs://", {}, "`celery -A PROJ delay declare` create the delay queues"),
        ("memory://", {"store": "sqlite:////var/shop.db"}, "there in celery_delay of sqlite:"),
        ("memory://", {}, "native delay has no store for memory"),
    ],
)
def test_other_brokers_have_nothing_to_export(
    tmp_path: Path, url: str, settings: dict[str, Any], why: str
) -> None:
    done = Project(tmp_path).write(APP, url, **settings).delay("export")
    assert (done.returncode, done.stdout) == (1, "")
    assert why in done.stderr


def test_the_virtual_host_comes_from_the_url_or_the_option(tmp_path: Path) -> None:
    shop = Project(tmp_path).write(APP, "amqp://127.0.0.1:9/shop%2Feu", **SMALL)
    said = json.loads(shop.delay("export").stdout)
    told = shop.told("export", "--vhost", "other")
    other = json.loads(told["text"])
    kinds = ("exchanges", "queues", "bindings")
    for kind in kinds:
        assert {item["vhost"] for item in said[kind]} == {"shop/eu"}
        assert {item["vhost"] for item in other[kind]} == {"other"}
    assert [told[kind] for kind in kinds] == [len(other[kind]) for kind in kinds]


# ---- a connection that may not declare -----------------------------------------------------


def test_a_publish_without_levels_names_both_remedies(vhost_url: str) -> None:
    """It declares nothing; delays work as soon as somebody else has declared the levels."""
    with delaying(vhost_url, declare=False) as connection:
        declare_queue(connection, "orders")
        with pytest.raises(NotDeclared, match=rf"{TOPOLOGY.ready_exchange} is missing") as refused:
            publish(connection, "refused", "orders", delay=1)
        assert "delay export" in str(refused.value)
        assert "native_delay_declare = True" in str(refused.value)
        publish(connection, "immediate", "orders")
        with delaying(vhost_url) as admin:
            declare_queue(admin, "orders")
            delays_of(admin).prepare()
        publish(connection, "later", "orders", delay=0.2)
        with inbox(vhost_url, "orders", declare=False) as letters:
            assert bodies(letters.wait_for(2)) == ["immediate", "later"]


@pytest.mark.parametrize("damage", ["queue_delete", "exchange_delete"])
def test_a_publish_names_a_deleted_level(vhost_url: str, damage: str) -> None:
    with delaying(vhost_url) as admin:
        declare_queue(admin, "orders")
        delays_of(admin).prepare()
        with delaying(vhost_url, declare=False) as connection:
            level = TOPOLOGY.level_queue(64)  # from 1.28 s on
            names = {"queue_delete": level, "exchange_delete": f"{level}.entry"}
            getattr(admin.default_channel, damage)(names[damage])
            with pytest.raises(NotDeclared, match=rf"{level}\.entry"):
                publish(connection, "refused", "orders", delay=2.2)
            delays_of(admin).prepare(redeclare=True)
            publish(connection, "later", "orders", delay=2.2)
            with inbox(vhost_url, "orders", declare=False) as letters:
                assert bodies(letters.wait_for(1)) == ["later"]


def test_users_declarations_leave_imported_objects_unchanged(
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
    gone = {each for each in before - ours() if json.loads(each)[0] != "bindings"}
    assert gone == set()


def test_a_user_without_configure_permission_delays_to_every_exported_exchange(
    shop: Project, rabbitmq: PrivateRabbitMQ, vhost_url: str, vhost: str
) -> None:
    """A fanout exchange as well, although its type cannot be asked for."""
    exported(shop)
    by_api(rabbitmq, shop.folder / "exported")
    limited = rabbitmq.add_user(f"limited-{vhost}", "secret", configure="", vhost=vhost)
    settings = {"namespace": "celery_delay", "resolution": 0.125, **SMALL}
    with delaying(limited, **settings) as connection:
        publish(connection, "by name", "few", delay=0.2)
        publish(connection, "topic", "a.parcel/x.b", exchange="shop", delay=0.2)
        publish(connection, "fanout", "", exchange="news", delay=0.2)
    with inbox(limited, "few", "parcels", "news", **settings) as letters:
        came = {arrival.queue: arrival.body for arrival in letters.wait_for(3)}
    assert came == {"few": "by name", "parcels": "topic", "news": "fanout"}
    with Connection(vhost_url) as stranger:
        topology = Topology(DelaySettings.from_mapping(SMALL))
        wait_until(lambda: parked_count(stranger, topology) == 0)

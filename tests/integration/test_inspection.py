"""RabbitMQ: ``delay declare | doctor | status | parked``."""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from time import time
from typing import Any

import pytest
from celery import Celery
from kombu import Connection

from celery_native_delay import DelaySettings, install
from celery_native_delay.finding import ADVICE, UNCHECKED, WRONG
from celery_native_delay.testing import PrivateRabbitMQ, private_redis
from celery_native_delay.transports.rabbitmq.declaring import apply
from celery_native_delay.transports.rabbitmq.inspection import examine, verify
from celery_native_delay.transports.rabbitmq.management import ManagementAPI, management_of
from celery_native_delay.transports.rabbitmq.status import RabbitStatus, status
from celery_native_delay.transports.rabbitmq.topology import Binding, Exchange, Queue, Topology
from tests.brokers import in_turn
from tests.integration.project import APP, Project
from tests.integration.traffic import (
    SETTINGS,
    TOPOLOGY,
    bind,
    declare_exchange,
    declare_queue,
    delaying,
    delays_of,
    inbox,
    on_all_versions,
    parked_count,
)
from tests.rabbitmqs import private_rabbitmq
from tests.traffic import publish
from tests.waiting import wait_until

LEVEL = TOPOLOGY.level_queue(8)
DELIVERY = TOPOLOGY.delivery_exchange

NOBODY_LISTENS = "http://127.0.0.1:9"
"""A privileged port, so no broker is ever given it."""


def api_of(connection: Any, management_url: str | None) -> ManagementAPI:
    settings = DelaySettings.from_mapping(SETTINGS | {"management_url": management_url})
    return management_of(connection, settings)


def verified(connection: Any, management_url: str | None) -> tuple[list[str], list[str]]:
    """The problems that are wrong, and those that could not be checked."""
    found = verify(delays_of(connection), api_of(connection, management_url))
    assert all(finding.remedy for finding in found)
    wrong, unchecked = ([f.problem for f in found if f.level == at] for at in (WRONG, UNCHECKED))
    return wrong, unchecked


def counted(connection: Any, management_url: str | None) -> RabbitStatus:
    return status(delays_of(connection), api_of(connection, management_url))


def declared_with(connection: Any, queue: str, **arguments: Any) -> None:
    """Replace *queue* by one with other arguments, and bind it again."""
    plan, channel = TOPOLOGY.plan(), connection.default_channel
    there = next(d for d in plan if isinstance(d, Queue) and d.name == queue)
    to_queue = (queue, False)
    bindings = [
        d for d in plan if isinstance(d, Binding) and (d.destination, d.to_exchange) == to_queue
    ]
    channel.queue_delete(queue)
    apply(channel, [Queue(queue, there.arguments | arguments), *bindings])


# ---- doctor ------------------------------------------------------------------------------------


@in_turn("settings", ({},), ({"fused_bits": 15, "levels": 31},), ({"fused_bits": 4, "levels": 9},))
def test_verify_finds_nothing_after_declaring(
    rabbitmq: PrivateRabbitMQ, vhost_url: str, settings: dict[str, Any]
) -> None:
    """With various settings, and with the user's own queues and exchanges."""
    with delaying(vhost_url, **settings) as connection:
        declare_exchange(connection, "news", "fanout")
        declare_exchange(connection, "shop", "topic")
        declare_queue(connection, "orders", **{"x-overflow": "reject-publish"})
        bind(connection, "orders", "shop", "orders.#")
        delays_of(connection).prepare(consuming=True)
        publish(connection, "hello", "", exchange="news", delay=0.1)
        for url in (rabbitmq.management_url, f"{rabbitmq.management_url}/"):
            assert verified(connection, url) == ([], [])


def test_verify_finds_each_difference(rabbitmq: PrivateRabbitMQ, connection: Any) -> None:
    """And has changed nothing."""
    channel = connection.default_channel
    missing, with_ttl, with_length = (TOPOLOGY.level_queue(units) for units in (1, 2, 64))
    no_exchange, ready = TOPOLOGY.level_exchange(4), TOPOLOGY.ready_exchange
    channel.queue_delete(missing)
    channel.queue_delete(TOPOLOGY.parking_queue)
    declared_with(connection, with_ttl, **{"x-message-ttl": 999})
    declared_with(connection, with_length, **{"x-max-length": 5})
    channel.exchange_delete(ready)
    channel.exchange_delete(DELIVERY)
    bindings = [each for each in TOPOLOGY.plan() if isinstance(each, Binding)]
    onto_it = [each for each in bindings if each.destination == DELIVERY]
    apply(channel, [Exchange(ready, "direct"), Exchange(DELIVERY, "topic"), *onto_it])
    channel.exchange_delete(no_exchange)
    onto_exchange = next(each for each in bindings if each.to_exchange)
    channel.exchange_unbind(
        onto_exchange.destination, onto_exchange.source, onto_exchange.routing_key
    )
    onto_queue = next(each for each in bindings if each.destination == LEVEL)
    channel.queue_unbind(LEVEL, onto_queue.source, onto_queue.routing_key)

    expected = [
        f"{missing}: queue is missing",
        f"{TOPOLOGY.parking_queue}: queue is missing",
        f"{with_ttl}: x-message-ttl 999, expected 41",
        f"{with_length}: x-max-length 5, expected None",
        f"{no_exchange}: exchange is missing",
        f"{ready}: type 'direct', expected 'fanout'",
        f"{DELIVERY}: alternate-exchange None, expected {TOPOLOGY.parking_exchange!r}",
    ]
    unbound = (onto_exchange, onto_queue)
    expected += [f"{b.source}: not bound to {b.destination} with {b.routing_key}" for b in unbound]
    for _ in range(2):
        wrong, unchecked = verified(connection, rabbitmq.management_url)
        assert (sorted(wrong), unchecked) == (sorted(expected), [])


def test_verify_names_queues_of_another_release(rabbitmq: PrivateRabbitMQ, connection: Any) -> None:
    delays = delays_of(connection)
    delays.prepare()
    api = api_of(connection, rabbitmq.management_url)
    assert verify(delays, api) == []
    old = f"{delays.settings.namespace}.v0.28x1000ms.level-07"
    declare_queue(connection, old)
    declare_queue(connection, f"{delays.settings.namespace}.vip.v1.31x125ms.level-07")  # another's
    (found,) = wait_until(lambda: verify(delays, api))
    assert (found.check, found.level) == ("old queues", ADVICE)
    assert f"such as {old}" in found.problem


@on_all_versions
def test_verify_finds_policies_on_delay_queues(
    rabbitmq: PrivateRabbitMQ, connection: Any, vhost: str
) -> None:
    """With no more than the tag "monitoring"; operator policies, too."""
    rabbitmq.add_user(f"watch-{vhost}", "watch", vhost=vhost, tags="monitoring")
    url = rabbitmq.management_url.replace("://", f"://watch-{vhost}:watch@")
    declare_queue(connection, "orders")
    harmful = {"message-ttl": 1000, "max-length": 5, "expires": 600_000}
    rabbitmq.set_policy(vhost, "elsewhere", "^orders", harmful)
    rabbitmq.set_policy(vhost, "harmless", r"\.level-0[01]$", {"queue-leader-locator": "balanced"})
    rabbitmq.set_policy(vhost, "short-lived", r"\.level-0[67]$", harmful)
    rabbitmq.set_policy(vhost, "strict", r"parked$", {"max-length": 7})
    retrying: dict[str, Any] = {"delivery-limit": 3}
    if rabbitmq.version.startswith("4."):
        retrying |= {"delayed-retry-type": "all", "delayed-retry-min": 1000}
    rabbitmq.set_policy(vhost, "retrying", r"\.level-05$", retrying)
    guard = {"pattern": r"level-02$", "definition": {"message-ttl": 1000}, "apply-to": "queues"}
    rabbitmq.api("PUT", f"/operator-policies/{vhost}/guard", guard)
    effect = "delayed messages may come early or get lost"
    expected = {
        f"{policy} on {number} delay queue(s) such as {first}: {effect}"
        for policy, number, first in (
            (
                "policy 'short-lived' sets message-ttl, max-length, expires",
                2,
                TOPOLOGY.level_queue(64),
            ),
            ("policy 'strict' sets max-length", 1, TOPOLOGY.parking_queue),
            ("operator policy 'guard' sets message-ttl", 1, TOPOLOGY.level_queue(4)),
        )
    }

    def further() -> set[str] | None:
        found = set(verified(connection, url)[0])
        return found - expected if expected < found else None

    (further_one,) = wait_until(further)
    assert all(key in further_one for key in retrying)
    for policy in ("short-lived", "strict", "retrying"):
        rabbitmq.api("DELETE", f"/policies/{vhost}/{policy}")
    rabbitmq.api("DELETE", f"/operator-policies/{vhost}/guard")
    wait_until(lambda: verified(connection, url) == ([], []))


def test_the_documented_pattern_matches_no_level_queue() -> None:
    """As the pattern of a policy, and as KEDA's query to the management API."""
    repository = Path(__file__).parents[2]
    (pattern,) = re.findall(
        r"\| `(\^celery\S+)` \|", (repository / "docs/brokers/rabbitmq.md").read_text()
    )
    assert pattern in (repository / "monitoring" / "alerts.yml").read_text()
    ours = [each.queue for each in Topology(DelaySettings()).level_queues]
    names = ["celery", "celery_delayed_orders", *ours]
    assert [name for name in names if re.search(pattern, name)] == names[:2]


# ---- without the management API ----------------------------------------------------------------


@pytest.fixture(scope="module")
def bare_rabbitmq(rabbitmq_version: str) -> Iterator[PrivateRabbitMQ]:
    """A broker without the management plugin."""
    with private_rabbitmq(version=rabbitmq_version, management=False) as broker:
        yield broker


@pytest.mark.ci
def test_without_the_plugin_missing_queues_are_found_and_messages_counted(
    bare_rabbitmq: PrivateRabbitMQ, rabbitmq: PrivateRabbitMQ
) -> None:
    with delaying(bare_rabbitmq.url) as connection:
        delays_of(connection).prepare()
        connection.default_channel.queue_delete(LEVEL)
        # The second is the API of another broker, where none of it is to be looked for.
        for url, reason in (
            (bare_rabbitmq.management_url, "does not answer"),
            (rabbitmq.management_url, "belongs to the broker"),
            (NOBODY_LISTENS, "does not answer"),
            (None, "management API at http://127.0.0.1:15672"),
        ):
            wrong, [unchecked] = verified(connection, url)
            assert wrong == [f"{LEVEL}: queue is missing"], url
            assert unchecked.startswith("levels and policies: ")
            assert reason in unchecked
            counts = counted(connection, url)
            assert counts.stuck is None
            assert [level.waiting for level in counts.levels] == [0] * 3 + [None] + [0] * 4


def test_verify_without_the_monitoring_tag_uses_amqp(rabbitmq: PrivateRabbitMQ, vhost: str) -> None:
    url = rabbitmq.add_user(f"clerk-{vhost}", "secret-word", vhost=vhost)
    with delaying(url) as connection:
        delays_of(connection).prepare()
        wrong, [unchecked] = verified(connection, rabbitmq.management_url)
        assert ("HTTP Error 401" in unchecked, "secret-word" in unchecked) == (True, False)
        with_credentials = rabbitmq.management_url.replace("://", "://guest:guest@")
        assert verified(connection, with_credentials) == (wrong, []) == ([], [])


# ---- status ------------------------------------------------------------------------------------

SLOW = {"resolution": 1.0}
"""Up to 255 s: what is sent stays in its level while a test looks at it."""

SLOW_TOPOLOGY = Topology(DelaySettings.from_mapping(SETTINGS | SLOW))


@on_all_versions
def test_status_counts_messages_stuck_in_dead_lettering(
    rabbitmq: PrivateRabbitMQ, connection: Any, vhost_url: str
) -> None:
    connection.default_channel.exchange_delete(TOPOLOGY.delivery_exchange)
    # Without confirms, a busy broker may drop what was sent right before the end of a connection.
    with Connection(vhost_url, transport_options={"confirm_publish": True}) as stranger:
        for _ in range(3):
            publish(stranger, "stuck", TOPOLOGY.level_queue(1))
    wait_until(lambda: counted(connection, rabbitmq.management_url).stuck == 3)


@pytest.mark.ci
def test_status_counts_messages_in_landing_queues(
    rabbitmq: PrivateRabbitMQ, connection: Any
) -> None:
    """An exchange without bindings keeps them there."""
    declare_exchange(connection, "news", "fanout")
    for _ in range(3):
        publish(connection, "held", "", exchange="news", delay=1)
    wait_until(lambda: counted(connection, rabbitmq.management_url).stuck == 3)
    delays, api = delays_of(connection), api_of(connection, rabbitmq.management_url)
    found = examine(delays, api, status(delays, api))
    (held,) = [finding for finding in found if finding.level == WRONG]
    assert "news" in held.problem
    assert "holds 3 message(s): their destination rejects them" in held.problem


# ---- the command line --------------------------------------------------------------------------


@pytest.fixture
def project(tmp_path: Path) -> Project:
    return Project(tmp_path, SETTINGS)


@pytest.fixture
def shop(project: Project, rabbitmq: PrivateRabbitMQ, vhost_url: str) -> Project:
    """An installed app on an empty virtual host."""
    return project.write(APP, vhost_url, management_url=rabbitmq.management_url)


def test_declare_then_doctor(shop: Project, vhost_url: str) -> None:
    done = shop.delay("doctor")
    assert done.returncode == 1
    assert f"wrong: delay levels: {LEVEL}: queue is missing" in done.stdout.splitlines()
    [line] = shop.lines("declare")
    assert line.startswith(f"declared {TOPOLOGY.name} and 2 binding(s) in ")
    told = shop.told("declare")
    assert told.pop("seconds") >= 0
    assert told == {"name": TOPOLOGY.name, "declared": True, "mirrored": 2}
    assert shop.lines("doctor")[-1] == "healthy"
    told = shop.told("doctor")
    assert told["healthy"] is True
    assert {finding["level"] for finding in told["findings"]} <= {ADVICE}

    # declare has bound the app's queue, so a delayed message arrives.
    with Connection(vhost_url) as stranger, delaying(vhost_url) as connection:
        publish(connection, "hello", "orders", delay=0.1)
        with inbox(vhost_url, "orders") as letters:
            assert letters.wait_for(1)[0].body == "hello"
        stranger.default_channel.queue_delete(TOPOLOGY.level_queue(128))
    told = shop.told("doctor", status=1)
    assert (told["healthy"], told["findings"][0]["check"]) == (False, "delay levels")
    assert told["findings"][0]["problem"] == f"{TOPOLOGY.level_queue(128)}: queue is missing"
    assert "`celery -A PROJ delay declare`" in told["findings"][0]["remedy"]

    shop.write(APP, vhost_url, management_url=NOBODY_LISTENS)
    assert "not checked: delay levels: levels and policies: " in shop.delay("doctor").stdout
    assert [shop.delay(each).returncode for each in ("doctor", "declare", "doctor")] == [1, 0, 0]


def test_status_prints_levels_waiting_parked_and_stuck_messages(
    shop: Project, rabbitmq: PrivateRabbitMQ, vhost_url: str
) -> None:
    shop.write(APP, vhost_url, management_url=rabbitmq.management_url, **SLOW)
    assert shop.lines("status")[0] == (
        f"8 level queue(s) are not declared, such as {SLOW_TOPOLOGY.level_queue(1)}"
    )
    with delaying(vhost_url, **SLOW) as connection, Connection(vhost_url) as stranger:
        declare_queue(connection, "orders")
        declare_queue(connection, "gone")
        delays_of(connection).prepare()
        stranger.default_channel.queue_delete("gone")
        publish(connection, "lost", "gone", delay=1)
        for delay in (100, 220, 230):
            publish(connection, "later", "orders", delay=delay)
        wait_until(lambda: parked_count(connection, SLOW_TOPOLOGY) == 1)
    lines = shop.lines("status")
    assert lines[:7] == [
        "level queue ttl waiting stuck",
        f"{SLOW_TOPOLOGY.level_queue(64)} 1 min 4 s 1 0",
        f"{SLOW_TOPOLOGY.level_queue(128)} 2 min 8 s 2 0",
        "waiting 3",
        "next due within 2 min 8 s",
        "parked 1",
        "stuck 0",
    ]
    assert "native_delay_store shows more" in lines[7]
    assert lines[8].startswith("wrong: parked: 1 message(s) are parked: ")
    assert "see `celery -A PROJ delay parked list`" in lines[9]
    told = shop.told("status")
    assert (told["name"], told["next_due_within_seconds"]) == (SLOW_TOPOLOGY.name, 128)
    assert (told["waiting"], told["parked"], told["stuck"]) == (3, 1, 0)
    level = {"queue": SLOW_TOPOLOGY.level_queue(128), "ttl_seconds": 128.0}
    assert told["levels"][-1] == level | {"waiting": 2, "stuck": 0}
    shop.write(APP, vhost_url, management_url=NOBODY_LISTENS, **SLOW)
    assert "stuck unknown (management API not reachable)" in shop.lines("status")
    assert shop.told("status")["stuck"] is None


@pytest.mark.ci
def test_status_counts_what_waits_in_the_store_and_what_is_left_in_the_broker(
    tmp_path: Path, rabbitmq: PrivateRabbitMQ, vhost_url: str
) -> None:
    settings = {"management_url": rabbitmq.management_url, "levels": 20}
    with private_redis() as store:
        for more in ({}, {"store": store.url}):
            with Celery("shop", broker=vhost_url, set_as_current=False) as app:
                install(app, **settings, **more)
                app.send_task("shop.remind", countdown=7000, queue="orders")
        shop = Project(tmp_path).write(APP, vhost_url, store=store.url, **settings)
        told = shop.told("status")
        assert (told["waiting"], told["overdue"], told["in_broker"]) == (1, 0, 1)
        assert told["waiting"] == shop.told("ls")["total"]
        lines = shop.lines("status")
        assert "waiting 1" in lines
        (advice,) = [line for line in lines if line.startswith("advice: broker:")]
        assert "1 task(s) still wait in the broker" in advice

        store.stop()
        done = shop.delay("status")
        assert (done.returncode, "does not work" in done.stderr) == (1, True)


def test_parked_messages_are_listed_requeued_and_purged(shop: Project, vhost_url: str) -> None:
    assert shop.lines("parked", "list") == ["0 parked message(s)"]
    assert shop.told("parked", "requeue")["delivered"] == 0
    with delaying(vhost_url) as connection, Connection(vhost_url) as stranger:
        for queue in ("orders", "gone"):
            declare_queue(connection, queue)
        delays_of(connection).prepare()
        for queue in ("orders", "gone"):
            stranger.default_channel.queue_delete(queue)
        started = time()
        for number, queue in enumerate(["orders", "gone", "orders"]):
            headers = {"task": "shop.remind", "id": f"id-{number}"}
            publish(connection, number, queue, delay=0.5, headers=headers)
            wait_until(lambda parked=number + 1: parked_count(connection) == parked)

        first, second = shop.told("parked", "list"), shop.told("parked", "list")
        assert first == second, "listing has moved them"
        assert first["parked"] == parked_count(connection) == 3
        assert [row["id"] for row in first["messages"]] == ["id-0", "id-1", "id-2"]
        row = first["messages"][1]
        assert (row["task"], row["exchange"], row["routing_key"]) == ("shop.remind", "", "gone")
        assert started <= datetime.fromisoformat(row["due"]).timestamp() <= time()
        assert shop.lines("parked", "list", "-n", "1") == [
            "task id exchange routing key due",
            f"shop.remind id-0 orders {first['messages'][0]['due']}",
            "3 parked message(s)",
        ]

        declare_queue(stranger, "orders")
        assert shop.lines("parked", "requeue") == [
            "2 parked message(s) delivered, 0 waiting again, 0 expired, 1 still parked"
        ]
        told = {"delivered": 0, "waiting_again": 0, "expired": 0, "still_parked": 1}
        assert shop.told("parked", "requeue") == told
        with inbox(vhost_url, "orders") as letters:
            assert sorted(arrival.body for arrival in letters.wait_for(2)) == [0, 2]

        done = shop.delay("parked", "purge", answer="n\n")
        assert f"Delete all messages in {TOPOLOGY.parking_queue}?" in done.stderr
        assert parked_count(connection) == 1
        assert shop.lines("parked", "purge", "-f") == ["1 parked message(s) deleted"]
        assert shop.told("parked", "purge", "-f") == {"purged": 0}
        assert parked_count(connection) == 0


def test_a_wrong_password_is_a_one_line_error(shop: Project, vhost_url: str) -> None:
    shop.write(APP, vhost_url.replace("guest:guest", "guest:mistyped"))
    done = shop.delay("status")
    assert (done.returncode, done.stdout) == (1, "")
    *_, last = done.stderr.splitlines()
    assert re.match("Error: .*ACCESS_REFUSED", last)
    assert "mistyped" not in done.stderr

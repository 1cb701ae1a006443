"""``bulk(app)`` on RabbitMQ: refused tasks are reported, lost ones are sent again.

It waits for an unreachable broker once, and does not wait after a refused login.

tests/conformance has the tests for all brokers.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from time import monotonic
from typing import Any

import pytest
from celery import Celery
from kombu import Connection, Exchange, Queue

from celery_native_delay import PublishRefused, install
from celery_native_delay.bulk import bulk
from celery_native_delay.testing import PrivateRabbitMQ, private_redis, require_redis
from celery_native_delay.transports import outbox
from pytest_celery_native_delay import installed
from tests.brokers import LARGEST_MESSAGE, in_ci
from tests.integration.traffic import (
    SETTINGS,
    TOPOLOGY,
    Inbox,
    delete_levels,
    inbox,
    on_all_versions,
)
from tests.postgresql import private_postgresql
from tests.traffic import eta_in
from tests.waiting import PATIENCE_SECONDS

ORDERS = Queue("orders", Exchange("shop", type="topic"), routing_key="order.#")
PLAIN = Queue("plain")


def make_app(url: str, **settings: Any) -> Celery:
    app = Celery("shop", broker=url, set_as_current=False)
    app.conf.update(
        task_queues=[PLAIN, ORDERS], task_default_queue="plain", task_ignore_result=True
    )
    install(app, **(SETTINGS | settings))

    @app.task(name="shop.remind", shared=False)
    def remind(number: int = 0, text: str = "") -> None:
        """Never run here."""

    return app


@on_all_versions
def test_refused_tasks_are_in_the_result(mortal_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A task that the broker refuses is reported; all others are confirmed."""
    app = make_app(mortal_url)
    batch = bulk(app)
    too_large = "x" * (2 * LARGEST_MESSAGE)

    def send_ten() -> None:
        with batch:
            for number in range(10):
                text = too_large if number == 5 else ""
                batch.send("shop.remind", (number, text), countdown=4)

    with pytest.raises(PublishRefused, match="1 refused") as refused:
        send_ten()
    (message,) = refused.value.refused
    assert "larger than" in message.reason
    assert message.headers["task"] == "shop.remind"
    assert batch.result.confirmed == 9
    # Even with MOST_REFUSED refused tasks, leaving the block does not raise with check=False.
    monkeypatch.setattr("celery_native_delay.bulk.batch.MOST_REFUSED", 1)
    with bulk(app, check=False) as batch:
        batch.send("shop.remind", (1, too_large), countdown=4)
    assert (len(batch.result.refused), batch.result.confirmed) == (1, 0)


def test_a_refusal_that_arrives_during_a_declare_is_in_the_result(mortal_url: str) -> None:
    app = make_app(mortal_url)
    with bulk(app, check=False) as batch:
        outbox = batch._publisher.outbox
        with outbox.lock:  # the outbox's own thread must not read the refusal
            batch.send("shop.remind", (1, "x" * (2 * LARGEST_MESSAGE)), countdown=4)
            outbox._close_batch()
            outbox._confirming.send_all(outbox._batches.popleft().puts)
            assert outbox._confirming.is_readable(60)  # the refusal has come, and is not read
            outbox.patiently(lambda channel: channel.exchange_declare("amq.direct", "direct", True))
        batch.send("shop.remind", (2,), countdown=4)
    assert (len(batch.result.refused), batch.result.confirmed) == (1, 1)


def test_no_more_than_the_window_is_unconfirmed(vhost_url: str) -> None:
    most = 0
    with bulk(make_app(vhost_url), window=7) as batch:
        for number in range(200):
            batch.send("shop.remind", (number,), countdown=0.5)
            most = max(most, batch._publisher.outbox.unconfirmed_count)
    assert 1 < most <= 7
    assert batch.result.confirmed == 200


@pytest.mark.parametrize("with_exchanges", [True, False])
def test_levels_that_are_deleted_under_a_batch_are_declared_again(
    vhost_url: str, rabbitmq: PrivateRabbitMQ, with_exchanges: bool
) -> None:
    """Returned messages, and those on a closed channel, are sent again."""
    with bulk(make_app(vhost_url)) as batch:
        batch.send("shop.remind", (-1,), countdown=5)
        batch._publisher.outbox.settle(timeout_seconds=PATIENCE_SECONDS)
        if with_exchanges:
            delete_levels(rabbitmq, vhost_url)
        else:
            with Connection(vhost_url) as admin:
                for hop in TOPOLOGY.level_queues:
                    admin.default_channel.queue_delete(hop.queue)
        for number in range(10):
            batch.send("shop.remind", (number,), countdown=2)
    with inbox(vhost_url, "plain") as letters:
        letters.receive_until(lambda: numbers(letters) >= set(range(10)))


def numbers(letters: Inbox) -> set[int]:
    return {arrival.body[0][0] for arrival in letters.arrivals}


@pytest.mark.ci
@pytest.mark.parametrize(
    ("options", "count"), [({}, 1_000), ({"headers": {"tenant": "a"}}, 300)], ids=str
)
def test_the_broker_is_killed_in_the_middle_of_a_batch(
    mortal_rabbitmq: PrivateRabbitMQ, mortal_url: str, options: dict[str, Any], count: int
) -> None:
    """The batch waits for the broker and loses nothing, with and without templates."""
    app = make_app(mortal_url, levels=12)
    with bulk(app) as batch:
        for number in range(count):
            if number == count // 2:
                mortal_rabbitmq.kill()
                mortal_rabbitmq.start()
            eta = eta_in(256 * SETTINGS["resolution"])
            batch.send("shop.remind", (number,), eta=eta, **options)
    assert batch.result.confirmed == count
    assert bool(batch.result.by_template) is not bool(options)
    with inbox(mortal_url, "plain") as letters:
        letters.receive_until(lambda: len(numbers(letters)) >= count)
        ids = {a.message.native_delay.delivery_id for a in letters.arrivals}
    assert numbers(letters) == set(range(count))
    assert len(ids) == count


@pytest.fixture(scope="module")
def locked_redis_url() -> Iterator[str]:
    """A Redis with the password "secret"."""
    installed(require_redis, "redis")
    with private_redis(server="redis", password="secret") as redis:
        yield redis.url


def place_of(url: str) -> str:
    return url.rpartition("/")[0]


@pytest.mark.ci
def test_a_login_that_rabbitmq_refuses_is_not_retried(
    rabbitmq: PrivateRabbitMQ, vhost_url: str
) -> None:
    rabbitmq.rabbitmqctl("add_user", "stranger", "stranger")
    said = {
        vhost_url.replace("guest:guest@", "guest:wrong@"): "ACCESS_REFUSED",
        f"{place_of(vhost_url)}/nowhere": "vhost nowhere not found",
        vhost_url.replace("guest:guest@", "stranger:stranger@"): "refused for user 'stranger'",
    }
    assert_refused_at_once(said)


def test_a_login_that_redis_refuses_is_not_retried(locked_redis_url: str) -> None:
    said = {
        locked_redis_url.replace("secret", "wrong"): "invalid username-password pair",
        locked_redis_url.replace(":secret@", ""): "Authentication required",
        f"{place_of(locked_redis_url)}/99": "DB index is out of range",
    }
    assert_refused_at_once(said)


@pytest.mark.ci
def test_a_database_that_cannot_be_opened_is_not_retried(tmp_path: Path) -> None:
    """As the broker, and as the store of another broker."""
    text = tmp_path / "text"
    text.write_text("no database at all, and long enough to be read as its head" * 9)
    with private_postgresql() as server:
        said = {
            server.url("nowhere"): "does not exist",
            f"sqlite:///{tmp_path}/nowhere/shop.db": "unable to open database file",
            f"sqlite:///{text}": "file is not a database",
        }
        assert_refused_at_once({f"sqla+{url}": reason for url, reason in said.items()})
        for url, reason in said.items():
            assert_refused_at_once({"memory://": reason}, store=url)


def assert_refused_at_once(said: dict[str, str], **settings: Any) -> None:
    for url, reason in said.items():
        begun = monotonic()
        with (
            pytest.raises(Exception, match=reason),
            bulk(make_app(url, levels=16, **settings), check=False) as batch,
        ):
            batch.send("shop.remind", countdown=60)
        assert monotonic() - begun < outbox.PATIENCE_SECONDS / 2
        assert (batch.result.sent, batch.has_given_up) == (0, True)


@pytest.mark.parametrize("scheme", [in_ci("amqp"), "redis", in_ci("sqla+postgresql+psycopg")])
def test_an_outage_is_waited_for_once_per_batch(
    scheme: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outbox, "PATIENCE_SECONDS", 10.0)
    took = []
    with bulk(make_app(f"{scheme}://127.0.0.1:1/0", levels=16), check=False) as batch:
        for _ in range(5):
            begun = monotonic()
            with suppress(Exception):
                batch.send("shop.remind", countdown=60)
            took.append(monotonic() - begun)
    assert batch.result.sent == 0
    assert took[0] > 10
    # Each further task is tried once.
    assert max(took[1:]) < 10

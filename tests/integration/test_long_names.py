"""Names of queues, exchanges and virtual hosts as long as AMQP allows.

A broker's error text quotes the name and has at most 255 bytes. If it has to cut a text that is not
ASCII, RabbitMQ 4.3 closes the connection with 541, and 3.10 may send half a character. So delays
refuse such names before they ask the broker.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import quote

import pytest
from kombu import Connection

from celery_native_delay import CannotDelay
from celery_native_delay.testing import PrivateRabbitMQ
from tests.brokers import on_one_version
from tests.integration.traffic import Inbox, bind, bodies, declare_exchange, declare_queue, delaying
from tests.traffic import publish


@pytest.fixture
def long_url(request: pytest.FixtureRequest, rabbitmq: PrivateRabbitMQ) -> Iterator[str]:
    """The url of a virtual host with the parameter as its name."""
    rabbitmq.api("PUT", f"/vhosts/{quote(request.param)}")
    permissions = dict.fromkeys(("configure", "write", "read"), ".*")
    rabbitmq.api("PUT", f"/permissions/{quote(request.param)}/guest", permissions)
    yield rabbitmq.url_of(request.param)
    rabbitmq.delete_vhost(request.param)


names = pytest.mark.parametrize(
    ("long_url", "name"),
    [
        pytest.param("short", "名" * 38, id="chinese name"),
        pytest.param("v" * 255, "n" * 255, id="ascii", marks=pytest.mark.ci),
    ],
    indirect=["long_url"],
)


@on_one_version
@pytest.mark.parametrize(
    ("long_url", "name"),
    [
        pytest.param("short", "名" * 85, id="chinese name"),
        pytest.param("虚" * 85, "n" * 255, id="chinese virtual host"),
        pytest.param("虚" * 40, "orders", id="short name there", marks=pytest.mark.ci),
    ],
    indirect=["long_url"],
)
def test_a_name_that_the_broker_cannot_quote_is_refused_for_delays_only(
    long_url: str, name: str
) -> None:
    """The connection still declares, consumes, publishes immediate messages, and deletes."""
    with delaying(long_url) as connection:
        connected = connection.connection
        declare_queue(connection, name, **{"x-overflow": "reject-publish"})
        declare_exchange(connection, name, "topic", **{"alternate-exchange": "amq.fanout"})
        bind(connection, name, name, "new")
        letters = Inbox(connection).consume([name])
        for exchange, key in (("", name), (name, "new")):
            publish(connection, "now", key, exchange=exchange)
            with pytest.raises(CannotDelay, match="or 130 bytes together"):
                publish(connection, "later", key, exchange=exchange, delay=0.2)
        assert bodies(letters.wait_for(2)) == ["now", "now"]
        letters.close()
        connection.default_channel.queue_unbind(name, name, "new")
        connection.default_channel.exchange_delete(name)
        connection.default_channel.queue_delete(name)
        assert connection.connection is connected


@on_one_version
def test_a_refused_name_does_not_stop_the_delays_of_others(vhost_url: str) -> None:
    """A missing queue, too, whose refusal would close the connection."""
    with delaying(vhost_url) as connection:
        declare_queue(connection, "orders")
        with pytest.raises(CannotDelay):
            publish(connection, "later", "名" * 85, delay=0.2)
        publish(connection, "later", "orders", delay=0.2)
        assert bodies(Inbox(connection).consume(["orders"]).wait_for(1)) == ["later"]


@names
def test_delayed_messages_arrive_at_queues_and_exchanges_of_any_name(
    long_url: str, name: str
) -> None:
    """A queue, and an exchange of each type, declared by a plain or an installed connection."""
    with Connection(long_url) as stranger, delaying(long_url) as consumer:
        declaring: list[tuple[str, Callable[[], Any]]] = [
            ("", lambda: declare_queue(stranger, name)),
            ("", lambda: declare_queue(consumer, name, **{"x-overflow": "reject-publish"})),
            *(
                (name, lambda by=by, kind=kind: declare_exchange(by, name, kind))
                for by in (stranger, consumer)
                for kind in ("direct", "topic", "fanout", "headers")
            ),
        ]
        for exchange, declare in declaring:
            by = consumer if declare is not declaring[0][1] else stranger
            declare()
            queue, key = (name, name) if not exchange else ("orders", "new")
            if exchange:
                by.default_channel.queue_declare("orders", durable=True, auto_delete=False)
                bind(by, "orders", name, key)
            letters = Inbox(by).consume([queue])
            with delaying(long_url) as producer:
                publish(producer, "now", key, exchange=exchange)
                publish(producer, "later", key, exchange=exchange, delay=0.2)
                assert bodies(letters.wait_for(2)) == ["now", "later"]
            letters.close()
            with Connection(long_url) as admin:
                admin.default_channel.queue_delete(queue)
                if exchange:
                    admin.default_channel.exchange_delete(exchange)

"""The demo's choice of a broker, by its argument and by the installed brokers."""

from __future__ import annotations

import pytest

from celery_native_delay.testing import BrokerMissing
from example_project.demo_broker import DemoBroker, choose


@pytest.mark.parametrize(
    ("asked", "there", "chosen"),
    [
        ("", "rabbitmq embedded", "rabbitmq"),
        ("", "embedded", "embedded"),
        ("rabbitmq", "rabbitmq embedded", "rabbitmq"),
        ("embedded", "rabbitmq embedded", "embedded"),
        ("filesystem", "", "filesystem"),
        ("redis://shop:6379/1", "", "redis://shop:6379/1"),
    ],
)
def test_the_demo_takes_the_broker_asked_for_or_the_best_installed_one(
    asked: str | None, there: str, chosen: str
) -> None:
    assert choice(asked, there) == chosen


@pytest.mark.parametrize(
    ("asked", "there", "said"),
    [
        ("", "", "apt install rabbitmq-server"),
        ("rabbitmq", "embedded", "make demo BROKER=embedded"),
        ("embedded", "rabbitmq", r"pip install 'celery_native_delay\[embedded\]'"),
        ("redis", "rabbitmq", "expected BROKER to be .*, sqs or a url, got 'redis'"),
    ],
)
def test_the_error_for_a_missing_broker_says_what_to_do(asked: str, there: str, said: str) -> None:
    with pytest.raises(BrokerMissing, match=said):
        choice(asked, there)


def choice(asked: str | None, there: str) -> str:
    return choose(asked, rabbitmq="rabbitmq" in there, embedded="embedded" in there)


def test_the_demo_shows_where_a_delay_waits_on_each_broker() -> None:
    for url, way in (
        ("amqps://localhost", "5 s"),
        ("redis+socket:///tmp/redis.sock", "sorted set"),
        ("filesystem:///tmp/shop", "SQLite"),
        ("sqs://key:secret@127.0.0.1:5000", "its queue"),
    ):
        broker = DemoBroker("a broker", url)
        assert (broker.way_of(5), broker.way_of(0)) == (way, "")

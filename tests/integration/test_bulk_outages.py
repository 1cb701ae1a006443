"""``bulk(app)`` waits for an unreachable broker once, and does not wait after a refused login."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from time import monotonic
from typing import Any
from urllib.parse import urlsplit

import pytest
from celery import Celery

from celery_native_delay import install
from celery_native_delay.bulk import bulk
from celery_native_delay.testing import (
    PrivateRabbitMQ,
    private_redis,
    require_redis,
    vhost_name,
)
from celery_native_delay.transports import outbox
from pytest_celery_native_delay import installed
from tests.brokers import on_one_version, self_signed_certificate
from tests.integration.traffic import SETTINGS
from tests.postgresql import private_postgresql

#: How long a batch waits for an unreachable broker.
PATIENCE_SECONDS = outbox.PATIENCE_SECONDS

NOBODY = "127.0.0.1:1"


def make_app(url: str, **settings: Any) -> Celery:
    use_ssl = settings.pop("use_ssl", None)
    app = Celery("shop", broker=url, set_as_current=False)
    app.conf.update(task_ignore_result=True, broker_use_ssl=use_ssl)
    return install(app, **(SETTINGS | {"levels": 16} | settings))


def answer_of(app: Celery) -> tuple[str, float]:
    """The error of sending a task, and the seconds until the batch has ended."""
    begun = monotonic()
    with pytest.raises(Exception, match=r"\S") as raised, bulk(app, check=False) as batch:
        batch.send("shop.remind", countdown=60)
    assert batch.result.sent == 0
    assert batch.has_given_up
    return f"{type(raised.value).__name__}: {raised.value}", monotonic() - begun


def with_user(url: str, user: str) -> str:
    return url.replace("//guest:guest@", f"//{user}:{user}@")


@on_one_version
@pytest.mark.ci
@pytest.mark.parametrize(
    ("broken", "said"),
    [
        (lambda url: url.replace("guest:guest@", "guest:wrong@"), "ACCESS_REFUSED"),
        (lambda url: f"{url.rpartition('/')[0]}/nowhere", "vhost nowhere not found"),
        (lambda url: with_user(url, "stranger"), "refused for user 'stranger'"),
    ],
    ids=["password", "vhost", "permission"],
)
def test_a_login_that_rabbitmq_refuses_is_not_retried(
    rabbitmq: PrivateRabbitMQ, vhost_url: str, broken: Callable[[str], str], said: str
) -> None:
    with suppress(Exception):  # from the test before
        rabbitmq.rabbitmqctl("add_user", "stranger", "stranger")
    text, seconds = answer_of(make_app(broken(vhost_url)))
    assert said in text
    assert seconds < PATIENCE_SECONDS / 2


@pytest.fixture(scope="module")
def locked_redis_url() -> Iterator[str]:
    """A Redis with the password "secret"."""
    installed(require_redis, "redis")
    with private_redis(server="redis", password="secret") as redis:
        yield redis.url


@pytest.mark.parametrize(
    ("broken", "said"),
    [
        (lambda url: url.replace("secret", "wrong"), "invalid username-password pair"),
        (lambda url: url.replace(":secret@", ""), "Authentication required"),
        (lambda url: f"{url.rpartition('/')[0]}/99", "DB index is out of range"),
    ],
    ids=["password", "none", "database"],
)
def test_a_login_that_redis_refuses_is_not_retried(
    locked_redis_url: str, broken: Callable[[str], str], said: str
) -> None:
    text, seconds = answer_of(make_app(broken(locked_redis_url)))
    assert said in text
    assert seconds < PATIENCE_SECONDS / 2


def test_a_certificate_that_is_not_trusted_is_not_retried(tmp_path: Path) -> None:
    installed(require_redis, "redis")
    certificate, key = self_signed_certificate(tmp_path)
    with private_redis(server="redis", tls=(certificate, key)) as redis:
        url = f"rediss://127.0.0.1:{urlsplit(redis.url).port}/0?ssl_cert_reqs=required"
        text, seconds = answer_of(make_app(url))
    assert "CERTIFICATE_VERIFY_FAILED" in text
    assert seconds < PATIENCE_SECONDS / 2


@pytest.mark.ci
@pytest.mark.parametrize("kind", ["broker", "store"])
@pytest.mark.parametrize("fault", ["database", "role", "folder", "no database"])
def test_a_database_that_cannot_be_opened_is_not_retried(
    kind: str, fault: str, tmp_path: Path
) -> None:
    """As the broker, and as the store of another broker."""
    with ExitStack() as stack:
        if fault in ("database", "role"):
            server = stack.enter_context(private_postgresql())
            url = server.url("nowhere")
            if fault == "role":
                url = server.new_database().replace("//postgres@", "//stranger@")
            said = "does not exist"
        else:
            text_file = tmp_path / "text"
            text_file.write_text("no database at all, and long enough to be read as its head" * 9)
            path, said = {
                "folder": (tmp_path / "nowhere" / "shop.db", "unable to open database file"),
                "no database": (text_file, "file is not a database"),
            }[fault]
            url = f"sqlite:///{path}"
        app = make_app(f"sqla+{url}") if kind == "broker" else make_app("memory://", store=url)
        text, seconds = answer_of(app)
    assert said in text
    assert seconds < PATIENCE_SECONDS / 2


@pytest.mark.parametrize(
    "url",
    [
        pytest.param(f"amqp://{NOBODY}", id="rabbitmq", marks=pytest.mark.ci),
        pytest.param(f"redis://{NOBODY}", id="redis"),
        pytest.param(
            f"sqla+postgresql+psycopg://postgres@{NOBODY}/shop", id="store", marks=pytest.mark.ci
        ),
    ],
)
def test_an_outage_is_waited_for_once_per_batch(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outbox, "PATIENCE_SECONDS", 10.0)
    took = []
    with bulk(make_app(url), check=False) as batch:
        for _ in range(5):
            begun = monotonic()
            with suppress(Exception):
                batch.send("shop.remind", countdown=60)
            took.append(monotonic() - begun)
    assert batch.result.sent == 0
    assert took[0] > 10
    # Each further task is tried once.
    assert max(took[1:]) < 10


@pytest.mark.ci
@on_one_version
def test_a_changed_password_ends_the_wait_for_confirms(
    mortal_rabbitmq: PrivateRabbitMQ, mortal_url: str
) -> None:
    ctl = mortal_rabbitmq.rabbitmqctl
    ctl("add_user", "bulk", "bulk")
    ctl("set_permissions", "-p", vhost_name(mortal_url), "bulk", ".*", ".*", ".*")
    app = make_app(with_user(mortal_url, "bulk"))
    longest_seconds = 2 * PATIENCE_SECONDS
    # The broker accepts some before it blocks publishers.
    text = "x" * 20_000
    try:
        with bulk(app, check=False, timeout_seconds=longest_seconds) as batch:
            batch.send("shop.remind", countdown=600)
            ctl("set_vm_memory_high_watermark", "absolute", "1MB")
            for _ in range(10):
                batch.send("shop.remind", (text,), countdown=600)
            ctl("change_password", "bulk", "another")
            ctl("close_all_connections", "--vhost", vhost_name(mortal_url), "changed")
            begun = monotonic()
        assert monotonic() - begun < longest_seconds / 2
        result = batch.result
        # A broker that closes connections may refuse what it has not stored.
        assert result.sent == 11
        assert result.confirmed + len(result.in_doubt) + len(result.refused) == 11
        assert result.in_doubt
    finally:
        ctl("set_vm_memory_high_watermark", "0.4")
        app.close()
        ctl("delete_user", "bulk")

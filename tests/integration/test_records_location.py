"""Where an app keeps its records: on its broker, or at native_delay_records."""

from __future__ import annotations

import ssl
from contextlib import closing
from typing import Any
from urllib.parse import quote

import pytest
from celery import Celery
from redis import CredentialProvider

from celery_native_delay import SettingsError, install
from celery_native_delay.app.installation import installed, records_location
from celery_native_delay.fence.in_records import Runs
from celery_native_delay.fence.run import COMMITTED, Record
from celery_native_delay.records.opened import RecordsLocation, records_at
from celery_native_delay.testing import private_redis

OWN = "celery_delay"
PASSWORD = "s3 cret"
TLS = {"ssl_cert_reqs": ssl.CERT_REQUIRED, "ssl_ca_certs": "/ca.pem", "ssl_keyfile": None}


def address_of(broker_url: str, **conf: Any) -> RecordsLocation | None:
    app = Celery("shop", broker=broker_url, set_as_current=False)
    app.conf.update(conf)
    install(app)
    return records_location(app, installed(app).settings())


@pytest.mark.parametrize(
    ("broker_url", "conf", "expected"),
    [
        ("redis://u:p%2F@h/3", {}, ("redis://u:p%2F@h:6379/3", OWN)),
        (
            "redis://h?credential_provider=p.P",
            {},
            ("redis://h:6379//?credential_provider=p.P", OWN),
        ),
        (
            "redis://h",
            {"broker_transport_options": {"global_keyprefix": "{q}:"}},
            ("redis://h:6379//", "{q}:celery_delay"),
        ),
        (
            "rediss://h:1/2",
            {"broker_use_ssl": TLS},
            ("rediss://h:1/2?ssl_cert_reqs=required&ssl_ca_certs=%2Fca.pem", OWN),
        ),
        ("sentinel://h:26379", {"broker_transport_options": {"master_name": "m"}}, None),
        ("sqla+postgresql://u:p@h/shop", {}, ("postgresql://u:p@h/shop", OWN)),
        ("memory://", {"native_delay_store": "sqlite:////d.db"}, ("sqlite:////d.db", OWN)),
        ("sqs://", {}, None),
        ("amqp://h/shop", {}, None),
        ("amqp://h/shop", {"native_delay_records": "redis://r"}, ("redis://r", OWN)),
        ("redis://h", {"native_delay_records": "redis://r"}, ("redis://r", OWN)),
        (
            "sentinel://h:26379",
            {"native_delay_records": "redis://r", "native_delay_namespace": "shop"},
            ("redis://r", "shop"),
        ),
    ],
)
def test_native_delay_records_comes_before_the_broker(
    broker_url: str, conf: dict[str, Any], expected: tuple[str, str] | None
) -> None:
    """Computed from the configuration, without a connection."""
    assert address_of(broker_url, **conf) == expected


class Credentials(CredentialProvider):  # type: ignore[misc]
    """Gives the password that kombu would not find in the URL, as one of AWS or Azure does."""

    def get_credentials(self) -> tuple[str]:
        return (PASSWORD,)


def test_records_use_the_credential_provider_of_a_url(server_name: Any) -> None:
    """As the broker does, which ignores a user and password beside it."""
    option = f"?credential_provider={__name__}.{Credentials.__name__}"
    done = Record(COMMITTED, 1.0)
    with private_redis(server=server_name, password=PASSWORD) as server:
        port = server.port
        for number, url in enumerate(
            (
                f"redis://127.0.0.1:{port}{option}",
                f"redis://ada:wrong@127.0.0.1:{port}{option}",
                f"{server.socket_url.replace(quote(PASSWORD), 'wrong')}{option}",
            )
        ):
            address = address_of(url)
            assert address is not None
            for each in (url, address.url):
                with closing(records_at(each, address.owner)) as records:
                    Runs(records).seal(f"r{number}", done, kept_seconds=100)


@pytest.mark.parametrize(
    ("provider", "got"), [("nowhere.Provider", "nowhere"), ("builtins.dict", "builtins.dict")]
)
def test_a_credential_provider_that_is_none_is_refused_with_the_remedy(
    provider: str, got: str
) -> None:
    with pytest.raises(SettingsError, match=f"expected .*CredentialProvider.*got .*{got}"):
        records_at(f"redis://h?credential_provider={provider}", OWN)


def test_records_on_the_broker_are_reached_by_the_brokers_url(server_name: Any) -> None:
    """By a socket, with a password, and in a numbered database."""
    done = Record(COMMITTED, 1.0)
    with private_redis(server=server_name, password=PASSWORD) as server:
        for url, found in (
            (server.url, []),
            (server.socket_url, [done]),
            (f"{server.socket_url}?virtual_host=3", []),
        ):
            address = address_of(url)
            assert address is not None
            with closing(records_at(*address)) as records:
                assert [each for each in Runs(records).load(["r"]) if each] == found
                Runs(records).seal("r", done, kept_seconds=100)

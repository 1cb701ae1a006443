"""``expose(app)`` without a running broker."""

from __future__ import annotations

import pytest
from celery import Celery
from prometheus_client import CollectorRegistry

from celery_native_delay import SettingsError, install
from celery_native_delay.metrics import expose
from tests.waiting import wait_until


def app_without_broker() -> Celery:
    return Celery("shop", broker="redis://127.0.0.1:1", set_as_current=False)


def test_an_app_is_exposed_once_per_registry_until_close() -> None:
    app, registry = install(app_without_broker()), CollectorRegistry()
    exposed = expose(app, registry)
    try:
        wait_until(lambda: registry.get_sample_value("celery_delay_broker_up") == 0)
        assert registry.get_sample_value("celery_delay_pending") is None
        with pytest.raises(ValueError, match="Duplicated timeseries"):
            expose(app, registry)
        exposed.counts.hear({"queues": {"celery": {"matured": 2}}})
        told = registry.get_sample_value("celery_delay_matured_total", {"queue_name": "celery"})
        assert told == 2
    finally:
        exposed.close()
    assert list(registry.collect()) == []


def test_an_app_without_install_cannot_be_exposed() -> None:
    with pytest.raises(SettingsError, match="install"):
        expose(app_without_broker(), CollectorRegistry())

"""Delayed Celery tasks that wait in the broker, not in the memory of workers.

>>> from celery import Celery
>>> from celery_native_delay import install
>>> app = install(Celery("proj", broker="amqp://"))

From then on every ``countdown`` and ``eta`` of that app waits in the broker. Plain kombu users
set ``transport_options={"native_delay": True}`` and publish with :func:`delay_headers`.
"""

from .celery_app.delay import Delay
from .celery_app.install import install
from .celery_app.outage import store_outage
from .core.errors import (
    BrokerFull,
    CannotDelay,
    DelayTooLong,
    FanOutFailed,
    FenceUnavailable,
    InvalidDueTime,
    InvalidFanOut,
    InvalidQuery,
    LedgerUnavailable,
    ManagementUnavailable,
    NativeDelayError,
    NoLedger,
    NotPermitted,
    PublishRefused,
    SettingsError,
    StoreUnavailable,
    TopologyMismatch,
    UnsupportedBroker,
)
from .core.ledger import Outcome, Query, Verdict, Waiting
from .core.refusal import RefusedMessage
from .core.settings import DelaySettings
from .kombu_hook import delay_headers, flush_delayed, register_transports, transport_for

__version__ = "0.1.0"

__all__ = (
    "BrokerFull",
    "CannotDelay",
    "Delay",
    "DelaySettings",
    "DelayTooLong",
    "FanOutFailed",
    "FenceUnavailable",
    "InvalidDueTime",
    "InvalidFanOut",
    "InvalidQuery",
    "LedgerUnavailable",
    "ManagementUnavailable",
    "NativeDelayError",
    "NoLedger",
    "NotPermitted",
    "Outcome",
    "PublishRefused",
    "Query",
    "RefusedMessage",
    "SettingsError",
    "StoreUnavailable",
    "TopologyMismatch",
    "UnsupportedBroker",
    "Verdict",
    "Waiting",
    "delay_headers",
    "flush_delayed",
    "install",
    "store_outage",
    "transport_for",
)

register_transports()

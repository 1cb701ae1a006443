"""Delayed Celery tasks wait in the broker, not in the memory of workers.

>>> from celery import Celery
>>> from celery_native_delay import install
>>> app = install(Celery("proj", broker="amqp://"))

After this, every task of the app with a ``countdown`` or ``eta`` waits in the broker. With plain
kombu, set ``transport_options={"native_delay": True}`` and publish with :func:`delay_headers`.
"""

from .app.delay import Delay
from .app.install import install
from .app.keyed import KeyedResult
from .app.runs import Run, RunStatus
from .app.transactions import in_transaction, outside_transaction
from .errors import (
    BrokerFull,
    CannotDelay,
    DelayTooLong,
    FanOutFailed,
    InvalidDueTime,
    InvalidFanOut,
    InvalidQuery,
    ManagementUnavailable,
    NativeDelayError,
    NoStore,
    NotConfirmed,
    NotDeclared,
    NotPermitted,
    PublishRefused,
    RefusedMessage,
    SettingsError,
    StoreUnavailable,
    TopologyMismatch,
    UnsupportedBroker,
)
from .rates.declared import Debounce, Throttle, Unique
from .rates.line import RateLine
from .rates.rate import Rate
from .rates.retry_after import RetryAfter
from .records.holds import Hold
from .records.waiting import Outcome, Query, Verdict, Waiting
from .settings import DelaySettings
from .transports.aliases import delay_headers, register_transports, transport_for

__version__ = "0.1.0.dev0"

__all__ = (
    "BrokerFull",
    "CannotDelay",
    "Debounce",
    "Delay",
    "DelaySettings",
    "DelayTooLong",
    "FanOutFailed",
    "Hold",
    "InvalidDueTime",
    "InvalidFanOut",
    "InvalidQuery",
    "KeyedResult",
    "ManagementUnavailable",
    "NativeDelayError",
    "NoStore",
    "NotConfirmed",
    "NotDeclared",
    "NotPermitted",
    "Outcome",
    "PublishRefused",
    "Query",
    "Rate",
    "RateLine",
    "RefusedMessage",
    "RetryAfter",
    "Run",
    "RunStatus",
    "SettingsError",
    "StoreUnavailable",
    "Throttle",
    "TopologyMismatch",
    "Unique",
    "UnsupportedBroker",
    "Verdict",
    "Waiting",
    "delay_headers",
    "in_transaction",
    "install",
    "outside_transaction",
    "transport_for",
)

register_transports()

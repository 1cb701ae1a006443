"""All errors that this package raises."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from billiard.exceptions import SoftTimeLimitExceeded


@dataclass(frozen=True)
class RefusedMessage:
    """A message that the broker refused or did not confirm, with all fields to publish it again.

    *delivery_id* is this package's id of a delayed message; None if the message had no delay.
    *returned* is True if no queue was bound for the message's *exchange* and *routing_key*.
    """

    reason: str
    exchange: str
    routing_key: str
    headers: Mapping[str, Any]
    body: bytes | str
    delivery_id: str | None = None
    returned: bool = False

    @property
    def task_id(self) -> str | None:
        """The id of the Celery task, or None if the message is not a Celery task."""
        return self.headers.get("id") if "task" in self.headers else None

    def __str__(self) -> str:
        name = f"{self.headers['task']}[{self.task_id}]" if "task" in self.headers else "a message"
        return f"{name} to exchange {self.exchange!r}, key {self.routing_key!r}: {self.reason}"


class NativeDelayError(Exception):
    """The base class of all errors that this package raises."""

    def __str__(self) -> str:
        return str(self.args[0]) if self.args else ""


class SettingsError(NativeDelayError, ValueError):
    """A setting has an unknown name or an invalid value."""


class InvalidDueTime(NativeDelayError, ValueError):
    """A countdown, an ETA or a duration is invalid."""


class DelayTooLong(InvalidDueTime):
    """The delay of a task is longer than the longest delay that the settings allow."""


class CannotDelay(NativeDelayError):
    """A message cannot wait in the broker. The error's text gives the reason and the remedy."""


class PublishRefused(NativeDelayError):
    """The broker refused, or did not confirm, the messages in the tuple *refused*."""

    def __init__(self, text: str, refused: tuple[RefusedMessage, ...] = ()) -> None:
        super().__init__(text, refused)
        self.refused = refused


class NotConfirmed(NativeDelayError):
    """RabbitMQ did not confirm a delayed message in time. It may have taken the message.

    Celery does not publish the task again. If you do, with the same ``task_id``, it may run twice.
    """


class TopologyMismatch(NativeDelayError):
    """A queue or exchange of this package exists in the broker, but with different arguments.

    Also raised if an incompatible release stored the state of a debounce, throttle or unique key.
    """


class NotPermitted(NativeDelayError):
    """The broker denies a permission that delayed messages need. The text names the permission."""


class NotDeclared(NativeDelayError):
    """RabbitMQ lacks a queue, exchange or binding, and ``native_delay_declare`` is False."""


class UnsupportedBroker(NativeDelayError):
    """This package does not support this broker, or this version of the broker."""


class BrokerFull(NativeDelayError):
    """The broker has no memory left for delayed messages, so the message was not sent."""


class StoreUnavailable(NativeDelayError):
    """The store does not answer in time, or refuses the call."""


class InvalidQuery(NativeDelayError, ValueError):
    """The text of a search for waiting tasks is invalid."""


class NoStore(StoreUnavailable):
    """This operation needs the setting ``native_delay_store``, which the app lacks."""


class InvalidFanOut(NativeDelayError, ValueError):
    """An option, a column or a row of ``FanOut`` or ``format("celery")`` in Spark is invalid."""


class FanOutFailed(NativeDelayError):
    """Sending tasks from Spark failed: for example, the broker did not confirm some tasks.

    *result* is the ``FanOutResult``, which lists the unconfirmed tasks. *result* is None if the
    error has another reason, or if ``format("celery")`` sent the rows.
    """

    def __init__(self, text: str, result: Any = None) -> None:
        super().__init__(text, result)
        self.result = result


class ManagementUnavailable(NativeDelayError):
    """RabbitMQ's management API cannot be read. Checks and message counts need this API."""


class ExtraMissing(ModuleNotFoundError):
    """A Python package for an optional feature is not installed. The text names the package."""


def described(error: BaseException) -> str:
    """Return an error's type and text for the log, such as ``ValueError: expected …``."""
    return f"{type(error).__name__}: {error}"


def why(error: Exception) -> str:
    """Return an error's text for users: with the type, except for errors of this package."""
    return str(error) if isinstance(error, NativeDelayError) else described(error)


@contextmanager
def errors_ignored() -> Iterator[None]:
    """Ignore all errors in a ``with`` block, except a soft time limit of the running task."""
    try:
        yield
    except SoftTimeLimitExceeded:
        raise
    except Exception:
        return


@contextmanager
def brought_by(extra: str, *, module: str) -> Iterator[None]:
    """Turn a failed import into ExtraMissing: *module* needs the pip extra *extra*."""
    try:
        yield
    except ModuleNotFoundError as exc:
        raise ExtraMissing(
            f"{module} needs the Python package {exc.name}, which is not installed: "
            f"pip install 'celery_native_delay[{extra}]'",
            name=exc.name,
        ) from exc

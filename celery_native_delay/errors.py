"""Every error that this package raises."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class RefusedMessage:
    """A message that the broker refused, with all that is needed to publish it again.

    *delivery_id* is None if the message had no delay. *returned* is true if no queue was bound for
    its *exchange* and *routing_key*.
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
        """The id of a Celery task, None for any other message."""
        return self.headers.get("id") if "task" in self.headers else None

    def __str__(self) -> str:
        name = f"{self.headers['task']}[{self.task_id}]" if "task" in self.headers else "a message"
        return f"{name} to exchange {self.exchange!r}, key {self.routing_key!r}: {self.reason}"


class NativeDelayError(Exception):
    """Base of every error this package raises."""

    def __str__(self) -> str:
        return str(self.args[0]) if self.args else ""


class SettingsError(NativeDelayError, ValueError):
    """A setting is unknown or has an impossible value."""


class InvalidDueTime(NativeDelayError, ValueError):
    """A countdown or ETA is no point in time."""


class DelayTooLong(InvalidDueTime):
    """The due time is further away than the longest delay."""


class CannotDelay(NativeDelayError):
    """This message cannot wait in the broker and then arrive as it would without the delay."""


class PublishRefused(NativeDelayError):
    """The broker refused some messages of a batch; *refused* lists all of them."""

    def __init__(self, text: str, refused: tuple[RefusedMessage, ...] = ()) -> None:
        super().__init__(text, refused)
        self.refused = refused


class TopologyMismatch(NativeDelayError):
    """The broker has a queue or exchange of this name with other arguments."""


class NotPermitted(NativeDelayError):
    """The broker user may not declare or bind what delayed delivery needs."""


class NotDeclared(NativeDelayError):
    """Something is missing on the broker, and ``native_delay_declare`` is off."""


class UnsupportedBroker(NativeDelayError):
    """This package does not support the broker, or not its version."""


class BrokerFull(NativeDelayError):
    """The broker has no memory left for delayed messages; nothing was sent."""


class StoreUnavailable(NativeDelayError):
    """The database of ``native_delay_store`` cannot be used; nothing was stored."""


class InvalidQuery(NativeDelayError, ValueError):
    """A search for waiting tasks cannot be parsed."""


class RecordsUnavailable(NativeDelayError):
    """The records are unreachable: waiting tasks cannot be listed or changed."""


class NoRecords(RecordsUnavailable):
    """This app has no ``native_delay_records``, and its broker keeps no records itself."""


class InvalidFanOut(NativeDelayError, ValueError):
    """An option or a column of a Spark fan-out is invalid; nothing was sent."""


class FanOutFailed(NativeDelayError):
    """The broker did not confirm some rows of a Spark fan-out.

    *result* lists these rows and counts the others.
    """

    def __init__(self, text: str, result: Any = None) -> None:
        super().__init__(text, result)
        self.result = result


class ManagementUnavailable(NativeDelayError):
    """RabbitMQ's management API, which only checks and counts use, cannot be read."""


class ExtraMissing(ModuleNotFoundError):
    """A package of an extra is missing; the text says what to install."""


def described(error: BaseException) -> str:
    """The type and text of an error for a log line: ``ValueError: expected …``."""
    return f"{type(error).__name__}: {error}"


@contextmanager
def brought_by(extra: str, *, whose: str) -> Iterator[None]:
    """Turn a failing import in the module *whose* into an error that names *extra* to install."""
    try:
        yield
    except ModuleNotFoundError as exc:
        raise ExtraMissing(
            f"{whose} needs the Python package {exc.name}, which is not installed: "
            f"pip install 'celery_native_delay[{extra}]'",
            name=exc.name,
        ) from exc

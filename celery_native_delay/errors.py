"""Every error that this package raises."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class RefusedMessage:
    """A message that the broker did not take: all that is needed to send it again.

    *exchange* and *routing_key* are what it was published with, *delivery_id* is None if it had
    no wait ahead; *returned* is True if it led nowhere.
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


class SettingsError(NativeDelayError, ValueError):
    """A setting is unknown or has an impossible value."""


class InvalidDueTime(NativeDelayError, ValueError):
    """A countdown or ETA that is no point in time."""


class DelayTooLong(InvalidDueTime):
    """The due time is further away than the delay levels reach."""


class CannotDelay(NativeDelayError):
    """This message cannot wait in the broker and arrive exactly as without the delay."""


class PublishRefused(NativeDelayError):
    """The broker did not take some messages of a batch; *refused* holds every one of them."""

    def __init__(self, text: str, refused: tuple[RefusedMessage, ...] = ()) -> None:
        super().__init__(text, refused)
        self.refused = refused

    def __str__(self) -> str:
        return str(self.args[0])


class TopologyMismatch(NativeDelayError):
    """The broker holds a queue or exchange of this name with other arguments."""


class NotPermitted(NativeDelayError):
    """The broker user may not declare or bind what delayed delivery needs."""


class NotDeclared(NativeDelayError):
    """Delayed delivery needs something that is not on the broker, and may not declare it."""


class UnsupportedBroker(NativeDelayError):
    """No transport of ours fits this connection, or the broker is too old."""


class BrokerFull(NativeDelayError):
    """The broker takes no more messages that wait; nothing was sent."""


class StoreUnavailable(NativeDelayError):
    """The database in which messages wait cannot be reached or used; nothing was stored."""


class InvalidQuery(NativeDelayError, ValueError):
    """A search for waiting tasks that cannot be understood."""


class RecordsUnavailable(NativeDelayError):
    """The records are away: waiting tasks cannot be seen or changed."""


class NoRecords(RecordsUnavailable):
    """This app has no records, and its broker cannot keep any."""


class InvalidFanOut(NativeDelayError, ValueError):
    """An option or a column of a Spark fan-out is impossible; nothing was sent."""


class FanOutFailed(NativeDelayError):
    """Rows of a Spark fan-out are not confirmed.

    *result* names every one of them, and counts the others.
    """

    def __init__(self, text: str, result: Any = None) -> None:
        super().__init__(text, result)
        self.result = result

    def __str__(self) -> str:
        return str(self.args[0])


class ManagementUnavailable(NativeDelayError):
    """RabbitMQ's management API cannot be read; only inspection needs it."""


class ExtraMissing(ModuleNotFoundError):
    """A package of an extra is not installed; the text says what to install."""


def described(error: BaseException) -> str:
    """The error with its type, for a log or a sentence: ``ValueError: expected …``."""
    return f"{type(error).__name__}: {error}"


@contextmanager
def brought_by(extra: str, *, whose: str) -> Iterator[None]:
    """A block of imports, in the module *whose*, that needs the packages of *extra*."""
    try:
        yield
    except ModuleNotFoundError as exc:
        raise ExtraMissing(
            f"{whose} needs the Python package {exc.name}, which is not installed: "
            f"pip install 'celery_native_delay[{extra}]'",
            name=exc.name,
        ) from exc

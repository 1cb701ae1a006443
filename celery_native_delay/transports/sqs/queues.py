"""Finding, creating and asking SQS queues, by way of a channel of kombu's."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from email.utils import parsedate_to_datetime
from typing import Any, NamedTuple

from botocore.exceptions import ClientError
from kombu.transport.SQS import DoesNotExistQueueException, UndefinedQueueException

from ...errors import CannotDelay, NotPermitted, UnsupportedBroker
from .delay_queue import LONGEST_NAME, asked_of, attributes_of, delay_queue_of

_GONE = ("AWS.SimpleQueueService.NonExistentQueue", "QueueDoesNotExist")
_MESSAGE_REFUSED = (
    "InvalidParameterValue",
    "InvalidMessageContents",
    "AWS.SimpleQueueService.BatchRequestTooLong",
    "BatchRequestTooLong",
)
_DENIED = ("AccessDenied", "AccessDeniedException")


class Failure(NamedTuple):
    """The reason why SQS did not take a message; *is_final* if it would not the next time."""

    reason: str
    is_final: bool


class Queues:
    """The queues of one channel, by the names that kombu's users give them."""

    def __init__(self, channel: Any) -> None:
        self._channel = channel

    def client(self, queue: str) -> Any:
        """The boto client for *queue*; predefined queues have each their own."""
        return self._channel.sqs(queue=self.name(queue))

    def name(self, queue: str) -> str:
        return str(self._channel.canonical_queue_name(queue))

    def url(self, queue: str) -> str:
        """The URL of *queue*, which is created if need be, as kombu does when it publishes."""
        return str(self._channel._new_queue(queue))

    def forget(self, queue: str) -> None:
        """Look for *queue* anew: it is not where it was."""
        self._channel._queue_cache.pop(self.name(queue), None)

    def find(self, queue: str) -> str | None:
        """The URL of *queue*; None if there is none, or can be."""
        if len(self.name(queue)) > LONGEST_NAME:
            return None
        try:
            return str(self._channel._resolve_queue_url(queue))
        except (DoesNotExistQueueException, UndefinedQueueException):
            return None

    def make_delay_queue(self, queue: str) -> str | None:
        """The URL of the delay queue of *queue*, which is created if need be.

        None if it should have been predefined, or its name is too long. Raises NotPermitted or
        UnsupportedBroker if SQS does not let us.
        """
        name = self.name(delay_queue_of(queue))
        found = self.find(delay_queue_of(queue))
        if found is not None or self._channel.predefined_queues or len(name) > LONGEST_NAME:
            return found
        options = self._channel.transport_options
        tags = options.get("queue_tags")
        with administered(name, "sqs:CreateQueue"):
            answer = self._channel.sqs(queue=name).create_queue(
                QueueName=name,
                Attributes=attributes_of(options.get("sqs-creation-attributes") or {}),
                **({"tags": tags} if tags else {}),
            )
        self._channel._queue_cache[name] = answer["QueueUrl"]
        return str(answer["QueueUrl"])

    def send_many(
        self, queue: str, messages: Sequence[Mapping[str, Any]], *, url: Callable[[], str]
    ) -> dict[int, Failure]:
        """Send up to ten at once; which of *messages* SQS did not take, and why.

        These are arguments of ``send_message`` without the *url*, which creates *queue* if need be.
        """
        entries = [{"Id": str(at), **message} for at, message in enumerate(messages)]

        def send() -> dict[str, Any]:
            answer: dict[str, Any] = self.client(queue).send_message_batch(
                QueueUrl=url(), Entries=entries
            )
            return answer

        try:
            answer = send()
        except ClientError as exc:
            if is_gone(exc):
                self.forget(queue)
                answer = send()  # into a new one, as kombu does
            elif not is_about_a_message(exc):
                raise
            elif len(messages) == 1:
                return {0: Failure(str(exc), is_final=True)}
            else:  # not the whole batch for one
                alone = (self.send_many(queue, [message], url=url) for message in messages)
                return {at: failed[0] for at, failed in enumerate(alone) if failed}
        return {
            int(each["Id"]): Failure(
                f"{each['Code']}: {each.get('Message')}", is_final=bool(each.get("SenderFault"))
            )
            for each in answer.get("Failed") or []
        }

    def attributes(self, queue: str, url: str) -> dict[str, str] | None:
        """Attributes of *queue* at *url*; None if it is gone. Raises if SQS does not let us ask."""
        name = self.name(queue)
        with administered(name, "sqs:GetQueueAttributes"):
            try:
                answer = self.client(queue).get_queue_attributes(
                    QueueUrl=url, AttributeNames=asked_of(name)
                )
            except ClientError as exc:
                if not is_gone(exc):
                    raise
                self.forget(queue)
                return None
        return dict(answer.get("Attributes") or {})


def is_gone(exc: ClientError) -> bool:
    """True if the queue that was asked for does not exist any more."""
    return exc.response.get("Error", {}).get("Code") in _GONE


def is_about_a_message(exc: ClientError) -> bool:
    """True if SQS refuses a message, or a batch for one of its messages, and not everything."""
    return exc.response.get("Error", {}).get("Code") in _MESSAGE_REFUSED


def dated_ms(answer: dict[str, Any]) -> int:
    """The time of SQS' answer by its own clock; Unix time in milliseconds, in whole seconds."""
    dated = answer.get("ResponseMetadata", {}).get("HTTPHeaders", {}).get("date")
    return int(parsedate_to_datetime(dated).timestamp()) * 1000 if dated else 0


@contextmanager
def explained(name: str, action: str) -> Iterator[None]:
    """Errors of SQS that a person can do something about, in plain words."""
    try:
        yield
    except ClientError as exc:
        error = exc.response.get("Error", {})
        code, text = str(error.get("Code")), str(error.get("Message"))
        if code in _DENIED:
            raise NotPermitted(f"expected to be allowed {action} on {name}: {text}") from exc
        if code == "InvalidParameterValue" and ("shorter than" in text or "size" in text.lower()):
            raise CannotDelay(f"{name} does not take this message: {text}") from exc
        raise


@contextmanager
def administered(name: str, action: str) -> Iterator[None]:
    """Errors of SQS about what is no message, all of them for a person to see to."""
    try:
        with explained(name, action):
            yield
    except ClientError as exc:
        raise UnsupportedBroker(f"{name}: expected SQS to do {action}, got: {exc}") from exc

"""Find, create and read SQS queues through a kombu channel."""

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


class SqsFailure(NamedTuple):
    """SQS's error for one message. If *is_final* is True, a retry is useless."""

    reason: str
    is_final: bool


class Queues:
    """Finds and creates the SQS queues of one kombu channel."""

    def __init__(self, channel: Any) -> None:
        self._channel = channel

    def client(self, queue: str) -> Any:
        """Return the boto client for *queue*; each predefined queue has a separate client."""
        return self._channel.sqs(queue=self.name(queue))

    def name(self, queue: str) -> str:
        return str(self._channel.canonical_queue_name(queue))

    def url(self, queue: str) -> str:
        """Return the URL of *queue*; if *queue* is missing, let kombu create *queue*."""
        return str(self._channel._new_queue(queue))

    def forget(self, queue: str) -> None:
        """Remove the URL of a deleted queue from the cache."""
        self._channel._queue_cache.pop(self.name(queue), None)

    def find(self, queue: str) -> str | None:
        """Return the URL of *queue*, or None if *queue* does not exist."""
        if len(self.name(queue)) > LONGEST_NAME:
            return None
        try:
            return str(self._channel._resolve_queue_url(queue))
        except (DoesNotExistQueueException, UndefinedQueueException):
            return None

    def make_delay_queue(self, queue: str) -> str | None:
        """Return the URL of *queue*'s delay queue; create the delay queue if it is missing.

        Returns None if the delay queue's name is too long. Also returns None if the setting
        ``predefined_queues`` is not empty and does not contain the delay queue.
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
    ) -> dict[int, SqsFailure]:
        """Send up to ten messages in one request; the function *url* returns the queue's URL.

        Returns a dict of the failures. A key is the position of the message in *messages*, from 0.
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
                answer = send()  # to a new queue, which kombu creates
            elif not is_about_a_message(exc):
                raise
            elif len(messages) == 1:
                return {0: SqsFailure(str(exc), is_final=True)}
            else:  # one message must not keep the others from being sent
                alone = (self.send_many(queue, [message], url=url) for message in messages)
                return {at: failed[0] for at, failed in enumerate(alone) if failed}
        return {
            int(each["Id"]): SqsFailure(
                f"{each['Code']}: {each.get('Message')}", is_final=bool(each.get("SenderFault"))
            )
            for each in answer.get("Failed") or []
        }

    def attributes(self, queue: str, url: str) -> dict[str, str] | None:
        """Return the SQS attributes of *queue*, or None if *queue* was deleted."""
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
    """Return True if SQS says that the queue does not exist."""
    return exc.response.get("Error", {}).get("Code") in _GONE


def is_about_a_message(exc: ClientError) -> bool:
    """Return True if the SQS error is about a message, not about the queue."""
    return exc.response.get("Error", {}).get("Code") in _MESSAGE_REFUSED


def dated_ms(answer: dict[str, Any]) -> int:
    """Return the HTTP date of SQS's response (ms since the epoch), or 0 without date."""
    dated = answer.get("ResponseMetadata", {}).get("HTTPHeaders", {}).get("date")
    return int(parsedate_to_datetime(dated).timestamp()) * 1000 if dated else 0


@contextmanager
def explained(name: str, action: str) -> Iterator[None]:
    """In a ``with`` block, turn permission and size errors into NotPermitted and CannotDelay."""
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
    """In a ``with`` block, turn SQS errors into NotPermitted, CannotDelay or UnsupportedBroker.

    The error says which *action* on the queue *name* failed.
    """
    try:
        with explained(name, action):
            yield
    except ClientError as exc:
        raise UnsupportedBroker(f"{name}: expected SQS to do {action}, got: {exc}") from exc

"""Find, create and read SQS queues, and the delay queues for delays over 15 minutes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from email.utils import parsedate_to_datetime
from typing import Any, NamedTuple

from botocore.exceptions import ClientError
from kombu.transport.SQS import DoesNotExistQueueException, UndefinedQueueException

from ...errors import CannotDelay, NotPermitted, UnsupportedBroker
from ...finding import WRONG, Finding
from . import hops
from .entry import MOST_BYTES

FIFO = ".fifo"
_SUFFIX = f"-delay{FIFO}"

#: The longest name of a queue that SQS accepts, in characters.
LONGEST_NAME = 80

#: 14 days, the longest retention of SQS. It starts again after each wait of up to 15 minutes.
RETENTION_SECONDS = 1_209_600

_CHECK = "delay queues"
_SET = "aws sqs set-queue-attributes --queue-url … --attributes "

_COUNTS = [
    "ApproximateNumberOfMessages",
    "ApproximateNumberOfMessagesDelayed",
    "ApproximateNumberOfMessagesNotVisible",
]
_SIZE = "MaximumMessageSize"
_FIFO_ONLY = ["DeduplicationScope", "FifoQueue", "FifoThroughputLimit"]

#: The attributes of a delay queue that are read: numbers of messages, and settings.
ASKED = [*_COUNTS, _SIZE, *_FIFO_ONLY, "DelaySeconds", "MessageRetentionPeriod", "RedrivePolicy"]

_GONE = ("AWS.SimpleQueueService.NonExistentQueue", "QueueDoesNotExist")
_MESSAGE_REFUSED = (
    "InvalidParameterValue",
    "InvalidMessageContents",
    "AWS.SimpleQueueService.BatchRequestTooLong",
    "BatchRequestTooLong",
)
_DENIED = ("AccessDenied", "AccessDeniedException")


def delay_queue_of(queue: str) -> str:
    """Return the name of the delay queue for delays over 15 minutes."""
    return f"{queue}{_SUFFIX}"


def can_delay(queue: str) -> bool:
    """Return True for standard queues: FIFO queues accept no ``DelaySeconds`` per message."""
    return not queue.endswith(FIFO)


def why_not_made(name: str) -> str:
    """Explain to the user why this package cannot create the delay queue *name*."""
    if len(name) > LONGEST_NAME:
        return (
            f"has {len(name)} characters and SQS takes {LONGEST_NAME}: shorten the name of its "
            f"queue or queue_name_prefix"
        )
    return "is not among predefined_queues: add it"


def attributes_of(user: Mapping[str, Any]) -> dict[str, str]:
    """Return a new delay queue's attributes; *user* is kombu's ``sqs-creation-attributes``."""
    others = {name: value for name, value in user.items() if name != "RedrivePolicy"}
    return others | {
        "FifoQueue": "true",
        "DelaySeconds": str(hops.HOP_SECONDS),
        "MessageRetentionPeriod": str(RETENTION_SECONDS),
        # Without these two attributes a FIFO queue takes only 300 requests per second.
        "DeduplicationScope": "messageGroup",
        "FifoThroughputLimit": "perMessageGroupId",
    }


def mismatches(name: str, attributes: Mapping[str, str]) -> list[Finding]:
    """Report each wrong attribute of an SQS delay queue."""
    expected = {"DelaySeconds": hops.HOP_SECONDS, "MessageRetentionPeriod": RETENTION_SECONDS}
    found = []
    for attribute, value in expected.items():
        has = attributes.get(attribute)
        if has != str(value):
            problem = f"{name}: {attribute} is {has}, expected {value}"
            found.append(Finding(_CHECK, WRONG, problem, f"{_SET}{attribute}={value}"))
    if attributes.get("FifoQueue") != "true":
        problem = f"{name}: expected a FIFO queue"
        found.append(Finding(_CHECK, WRONG, problem, "delete it, a worker creates it"))
    if attributes.get("RedrivePolicy"):
        problem = (
            f"{name}: RedrivePolicy is {attributes['RedrivePolicy']}, expected none, since it "
            f"takes away messages that still wait"
        )
        found.append(Finding(_CHECK, WRONG, problem, f"{_SET}RedrivePolicy="))
    return found


def most_bytes_of(attributes: Mapping[str, str]) -> int:
    """Return the largest message size, in bytes, that an SQS queue accepts."""
    return int(attributes.get(_SIZE) or MOST_BYTES)


def waiting_in(attributes: Mapping[str, str]) -> int:
    """Return the approximate number of messages in a delay queue."""
    return sum(int(attributes.get(name) or 0) for name in _COUNTS)


def overdue_in(attributes: Mapping[str, str]) -> int:
    """Return the approximate number of overdue messages in a delay queue."""
    lying = int(attributes.get("ApproximateNumberOfMessages") or 0)
    in_flight = int(attributes.get("ApproximateNumberOfMessagesNotVisible") or 0)
    return lying if in_flight == 0 else 0  # in flight: a worker is receiving messages


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

    def declared_url(self, queue: str) -> str:
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

    def can_make(self, name: str) -> bool:
        """Return True if this package may create the delay queue *name*."""
        return len(name) <= LONGEST_NAME and not self._channel.predefined_queues

    def make_delay_queue(self, queue: str) -> str | None:
        """Return the URL of *queue*'s delay queue; create the delay queue if it is missing.

        Returns None if the delay queue's name is too long. Also returns None if the setting
        ``predefined_queues`` is not empty and does not contain the delay queue.
        """
        name = self.name(delay_queue_of(queue))
        found = self.find(delay_queue_of(queue))
        if found is not None or not self.can_make(name):
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
            elif exc.response.get("Error", {}).get("Code") not in _MESSAGE_REFUSED:
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

    def known(self, queue: str) -> dict[str, str] | None:
        """Return the SQS attributes of *queue*, or None if there is no such queue."""
        url = self.find(queue)
        return None if url is None else self.attributes(queue, url)

    def attributes(self, queue: str, url: str) -> dict[str, str] | None:
        """Return the SQS attributes of *queue*, or None if *queue* was deleted."""
        name = self.name(queue)
        asked = ASKED if name.endswith(FIFO) else [*_COUNTS, _SIZE]
        with administered(name, "sqs:GetQueueAttributes"):
            try:
                answer = self.client(queue).get_queue_attributes(QueueUrl=url, AttributeNames=asked)
            except ClientError as exc:
                if not is_gone(exc):
                    raise
                self.forget(queue)
                return None
        return dict(answer.get("Attributes") or {})


def is_gone(exc: ClientError) -> bool:
    """Return True if SQS says that the queue does not exist."""
    return exc.response.get("Error", {}).get("Code") in _GONE


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

"""Names and attributes of SQS delay queues, for delays over 15 minutes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...finding import ADVICE, WRONG, Finding
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


def asked_of(name: str) -> list[str]:
    """Return the names of the attributes that this package reads of the SQS queue *name*."""
    return ASKED if name.endswith(FIFO) else [*_COUNTS, _SIZE]


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


def advice(name: str, attributes: Mapping[str, str]) -> list[Finding]:
    """Report a delay queue without SQS's high throughput mode."""
    if attributes.get("FifoThroughputLimit") == "perMessageGroupId":
        return []
    way = "DeduplicationScope=messageGroup,FifoThroughputLimit=perMessageGroupId"
    return [Finding(_CHECK, ADVICE, f"{name}: takes 300 requests a second", f"{_SET}{way}")]


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

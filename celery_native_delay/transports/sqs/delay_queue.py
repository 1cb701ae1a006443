"""Delay queues: their name, what they must be, and what is wrong with one. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...finding import ADVICE, WRONG, Finding
from . import hops
from .entry import MOST_BYTES

FIFO = ".fifo"
_SUFFIX = f"-delay{FIFO}"

#: Characters of a queue's name that SQS takes.
LONGEST_NAME = 80

#: 14 days in seconds, the longest that SQS keeps a message. It is counted anew with every hop.
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

#: What a delay queue is asked: what is in it, and what decides how it behaves.
ASKED = [*_COUNTS, _SIZE, *_FIFO_ONLY, "DelaySeconds", "MessageRetentionPeriod", "RedrivePolicy"]


def asked_of(name: str) -> list[str]:
    """Attributes that any queue is asked for; SQS refuses those that only FIFO queues have."""
    return ASKED if name.endswith(FIFO) else [*_COUNTS, _SIZE]


def delay_queue_of(queue: str) -> str:
    """The queue in which messages for *queue* wait for longer than a hop; its name in kombu."""
    return f"{queue}{_SUFFIX}"


def can_delay(queue: str) -> bool:
    """True if messages for *queue* can wait in SQS: FIFO queues take no delay per message."""
    return not queue.endswith(FIFO)


def why_not_made(name: str) -> str:
    """The reason why the delay queue *name* is not made, and the way out."""
    if len(name) > LONGEST_NAME:
        return (
            f"has {len(name)} characters and SQS takes {LONGEST_NAME}: shorten the name of its "
            f"queue or queue_name_prefix"
        )
    return "is not among predefined_queues: add it"


def attributes_of(user: Mapping[str, Any]) -> dict[str, str]:
    """Attributes to create a delay queue with; *user* are kombu's ``sqs-creation-attributes``."""
    others = {name: value for name, value in user.items() if name != "RedrivePolicy"}
    return others | {
        "FifoQueue": "true",
        "DelaySeconds": str(hops.HOP_SECONDS),
        "MessageRetentionPeriod": str(RETENTION_SECONDS),
        # Without these two a FIFO queue takes 300 requests a second.
        "DeduplicationScope": "messageGroup",
        "FifoThroughputLimit": "perMessageGroupId",
    }


def mismatches(name: str, attributes: Mapping[str, str]) -> list[Finding]:
    """Faults of a delay queue."""
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
    if attributes.get("FifoThroughputLimit") == "perMessageGroupId":
        return []
    way = "DeduplicationScope=messageGroup,FifoThroughputLimit=perMessageGroupId"
    return [Finding(_CHECK, ADVICE, f"{name}: takes 300 requests a second", f"{_SET}{way}")]


def most_bytes_of(attributes: Mapping[str, str]) -> int:
    """Bytes of the largest message that a queue takes."""
    return int(attributes.get(_SIZE) or MOST_BYTES)


def waiting_in(attributes: Mapping[str, str]) -> int:
    """The number of messages in a delay queue, about."""
    return sum(int(attributes.get(name) or 0) for name in _COUNTS)


def overdue_in(attributes: Mapping[str, str]) -> int:
    """Number of messages that a relay should have taken, if none seems to run.

    A relay that runs holds what it has taken for a moment, and leaves nothing lying.
    """
    lying = int(attributes.get("ApproximateNumberOfMessages") or 0)
    in_flight = int(attributes.get("ApproximateNumberOfMessagesNotVisible") or 0)
    return lying if in_flight == 0 else 0

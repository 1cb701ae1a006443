"""Code for workers on SQS: create delay queues, and move delayed messages."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from uuid import uuid4

from botocore.exceptions import BotoCoreError, ClientError
from kombu.exceptions import OperationalError

from ...durations import duration
from ...errors import TopologyMismatch
from ...finding import Finding
from ...settings import DelaySettings
from ..interface import Wait, WorkerPart
from . import hops
from .queues import can_delay, delay_queue_of, mismatches, why_not_made
from .relay import SqsRelay

logger = logging.getLogger(__name__)


class SqsWorkerPart(WorkerPart):
    comes_back_late_seconds = 2.0  # delays are rounded up, and kombu pauses a second

    def __init__(self, channel: Any, settings: DelaySettings) -> None:
        super().__init__(channel, settings)
        self._queues: list[str] = []

    def serve(self, queues: Sequence[str]) -> None:
        self._queues = [queue for queue in queues if can_delay(queue)]

    def prepare(self, where: str) -> str:
        self._delays.check_settings()
        found, lacking, wrong = set_up(self._delays, self._queues)
        if not found:
            refuse(wrong)
        for queue, findings in wrong.items():
            told = "; ".join(map(str, findings))
            logger.critical("native delay: no relay serves %r: %s", queue, told)
        self._queues = [queue for queue in self._queues if queue not in wrong]
        for name in lacking:
            logger.warning(
                "native delay: %s %s. Tasks that are due in more than %s come back to a worker "
                "that often",
                name,
                why_not_made(name),
                duration(hops.HOP_SECONDS),
            )
        return (
            f"{where} holds delayed tasks, for longer than {duration(hops.HOP_SECONDS)} in "
            f"{', '.join(found) or 'no queue'}; relaying in this process; {self.terms}"
        )

    def put_one_back(self, wait: Wait) -> None:
        message, message_id = _as_sent(wait.on(wait.message._raw))
        try:
            self._delays.publish(
                wait.queue,
                message,
                due_us=wait.due_us,
                delivery_id=wait.delivery_id or message_id,
            )
        except (ClientError, BotoCoreError) as exc:
            raise OperationalError(str(exc)) from exc

    def promoter(self, connect: Callable[..., Any]) -> SqsRelay:
        return SqsRelay(connect, self._queues)


def set_up(
    delays: Any, queues: Sequence[str]
) -> tuple[list[str], list[str], dict[str, list[Finding]]]:
    """Create the delay queues of *queues*.

    Returns three groups: the usable delay queues, the delay queues that SQS did not create, and the
    delay queues with wrong attributes.
    """
    found, lacking, wrong = [], [], {}
    for queue in queues:
        name = delays.queues.name(delay_queue_of(queue))
        url = delays.queues.make_delay_queue(queue)
        if url is None:
            lacking.append(name)
            continue
        attributes = delays.queues.attributes(delay_queue_of(queue), url) or {}
        findings = mismatches(name, attributes)
        if findings:
            wrong[queue] = findings
        else:
            found.append(name)
    return found, lacking, wrong


def refuse(wrong: Mapping[str, Sequence[Finding]]) -> None:
    """Raise TopologyMismatch if a delay queue has wrong attributes."""
    if wrong:
        raise TopologyMismatch(
            "; ".join(str(finding) for each in wrong.values() for finding in each)
        )


def _as_sent(raw: dict[str, Any]) -> tuple[dict[str, Any], str]:
    """Undo kombu's changes to a received message; return the message and its SQS message id."""
    properties = dict(raw["properties"])
    info = dict(properties.get("delivery_info") or {})
    received = info.pop("sqs_message", None) or {}
    info.pop("sqs_queue", None)
    properties["delivery_info"] = info
    message_id = str(received.get("MessageId") or uuid4())
    properties["delivery_tag"] = message_id
    if received.get("MessageAttributes"):
        properties["message_attributes"] = received["MessageAttributes"]
    return {**raw, "properties": properties}, message_id

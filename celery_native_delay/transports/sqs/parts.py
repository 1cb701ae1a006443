"""The operations of workers and of the ``delay`` commands on SQS."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any
from uuid import uuid4

from botocore.exceptions import BotoCoreError, ClientError
from kombu.exceptions import OperationalError

from ...durations import duration
from ...errors import NativeDelayError, TopologyMismatch
from ...finding import UNCHECKED, WRONG, Finding
from ...settings import DelaySettings
from ...texts import table
from ..interface import AdminPart, Backlog, Told, Wait, WorkerPart
from . import hops
from .queues import (
    administered,
    can_delay,
    delay_queue_of,
    mismatches,
    overdue_in,
    waiting_in,
    why_not_made,
)
from .relay import SqsRelay

logger = logging.getLogger(__name__)

_RELAY = (
    "start an installed worker that consumes from there or, where all workers are plain ones, run "
    "`celery -A PROJ delay promote` beside them"
)

_DELAYED = "ApproximateNumberOfMessagesDelayed"


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


class SqsAdminPart(AdminPart):
    parking = "none: a message that cannot be delivered is tried again from its delay queue"

    def __init__(self, channel: Any) -> None:
        self._channel = channel
        self._delays = channel.delays
        self._queues: list[str] = []
        self.name = "the delay queues of this app"

    def serve(self, queues: Sequence[Any]) -> None:
        self._queues = [queue.name for queue in queues if can_delay(queue.name)]
        self.name = ", ".join(name for _, name in self._named())

    def declare(self, queues: Sequence[Any]) -> Told:
        self._delays.check_settings()
        names = [queue.name for queue in queues if can_delay(queue.name)]
        found, lacking, wrong = set_up(self._delays, names)
        refuse(wrong)
        sentences = [f"{name}: ready" for name in found]
        sentences += [f"{name}: {why_not_made(name)}" for name in lacking]
        return Told({"queues": found, "lacking": lacking}, sentences)

    def examine(self) -> Iterator[Finding]:
        self._delays.check_settings()
        for queue, name in self._named():
            attributes = self._attributes(queue)
            if attributes is None:
                why = "missing: run `celery -A PROJ delay declare`, which creates it"
                if not self._delays.queues.can_make(name):
                    why = why_not_made(name)
                yield Finding.of_sentence("delay queues", WRONG, f"{name}: {why}")
            else:
                yield from mismatches(name, attributes)
        counted = self.status()
        yield from counted.found
        silent = [
            each["delay_queue"]
            for each in counted.facts["queues"]
            if each["on_the_way"] is not None and not each["overdue"]
        ]
        if silent:
            problem = (
                f"whether anything relays from {', '.join(silent)}: SQS tells it only of messages "
                f"that have done their wait, and none lies there"
            )
            yield Finding("relaying", UNCHECKED, problem, f"make sure of it: {_RELAY}")

    def status(self) -> Told:
        """Tell approximate counts, and messages that no relay receives from a delay queue."""
        queues = [self._counted(*named) for named in self._named()]
        waiting = sum(each["here"] + (each["on_the_way"] or 0) for each in queues)
        overdue = sum(each["overdue"] for each in queues)
        facts = {"parked": 0, "name": self.name, "queues": queues}
        rows = [
            (each["queue"], each["here"], "-" if each["on_the_way"] is None else each["on_the_way"])
            for each in queues
        ]
        lines = [
            table(("queue", "waiting here", "in its delay queue"), rows),
            f"waiting   about {waiting}",
            "next due  unknown (SQS does not tell)",
            f"overdue   {f'about {overdue}' if overdue else 0}",
        ]
        found = [
            Finding(
                "relaying",
                WRONG,
                f"{each['delay_queue']}: about {each['overdue']} message(s) have done their wait "
                f"and nothing takes them: no installed worker of {each['queue']!r} and no "
                f"`celery -A PROJ delay promote` is running",
                _RELAY,
            )
            for each in queues
            if each["overdue"]
        ]
        return Told(facts | {"waiting": waiting, "overdue": overdue}, lines, found)

    def backlog(self) -> Backlog:
        return Backlog(self.status().facts["waiting"], 0)

    def purge(self) -> int:
        """Purge the delay queues.

        Returns the approximate number of messages that were in the delay queues.
        """
        purged = 0
        for queue, name in self._named():
            attributes = self._attributes(queue)
            if not attributes:
                continue
            source = delay_queue_of(queue)
            # Messages with short delays stay in *queue*: SQS cannot purge these separately.
            with administered(name, "sqs:PurgeQueue"):
                self._delays.queues.client(source).purge_queue(
                    QueueUrl=self._delays.queues.declared_url(source)
                )
            purged += waiting_in(attributes)
        return purged

    def uninstall(self) -> list[str]:
        """Delete the delay queues of this app's queues."""
        found = [(queue, name, self._attributes(queue)) for queue, name in self._named()]
        for _, name, attributes in found:
            if attributes is not None and (count := waiting_in(attributes)):
                raise NativeDelayError(
                    f"about {count} message(s) wait in {name}: let a worker or `celery -A PROJ "
                    f"delay promote` run until `celery -A PROJ delay status` shows none"
                )
        for queue, name, attributes in found:
            if attributes is not None:
                source = delay_queue_of(queue)
                url = self._delays.queues.declared_url(source)
                with administered(name, "sqs:DeleteQueue"):
                    self._delays.queues.client(source).delete_queue(QueueUrl=url)
        return [name for _, name, attributes in found if attributes is not None]

    def _named(self) -> Iterator[tuple[str, str]]:
        for queue in self._queues:
            yield queue, self._delays.queues.name(delay_queue_of(queue))

    def _attributes(self, queue: str) -> dict[str, str] | None:
        return self._delays.queues.known(delay_queue_of(queue))  # type: ignore[no-any-return]

    def _counted(self, queue: str, delay_queue: str) -> dict[str, Any]:
        """Count the messages that wait in a queue (*here*), and in its delay queue."""
        attributes = self._attributes(queue)
        return {
            "queue": queue,
            "delay_queue": delay_queue,
            "here": int((self._delays.queues.known(queue) or {}).get(_DELAYED) or 0),
            "on_the_way": None if attributes is None else waiting_in(attributes),
            "overdue": overdue_in(attributes or {}),
        }


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

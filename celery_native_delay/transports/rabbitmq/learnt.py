"""Templates of messages to RabbitMQ: their frames, their destination, their way into the levels."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from functools import lru_cache
from time import time_ns
from typing import Any

import amqp
from amqp.method_framing import frame_writer

from ...due_time import check_reach, milliseconds_up, units_until
from ...errors import RefusedMessage
from ...message import HEADER
from .. import bulk_publisher
from ..bulk_publisher import TaskValues, differing
from ..random_ids import RandomIds
from .channels import Publication
from .entry import Entry
from .recording import Recorder
from .template import FramedTask, TaskFields, Template
from .topology import Topology
from .wrapping import unwrap

#: The channel and the size of frames for which two encodings are compared.
_SOMEWHERE = {"channel_id": 7, "frame_max": 131_072}


class FramedPublication:
    """A publication on its way through an outbox."""

    def __init__(self, publication: Publication, to: tuple[str, str]) -> None:
        """*to* is the user's own exchange and routing key."""
        self.publication = publication
        self.to = to
        self.exchange = publication.exchange
        self.frames = b""

    @property
    def id(self) -> Hashable:
        return self.publication.id

    @property
    def size_bytes(self) -> int:
        return len(self.frames)

    def encode(self, channel_id: int, frame_max: int) -> None:
        self.frames = frames_of(self.publication, channel_id=channel_id, frame_max=frame_max)

    def refused(self, reason: str) -> RefusedMessage:
        return self.publication.refused(reason)


class Learnt(bulk_publisher.Learnt):
    """A template of frames, for tasks that go where one task went."""

    def __init__(
        self,
        template: Template,
        to: tuple[str, str],
        topology: Topology,
        properties: Mapping[str, Any],
        recorder: Recorder | None,
        body: bytes,
    ) -> None:
        super().__init__(body)
        self._template = template
        self._to = to
        self._topology = topology
        self._properties = {
            name: value for name, value in properties.items() if name != "application_headers"
        }
        self._recorder = recorder
        self._address = topology.address(*to)
        #: Entry exchange and routing key of a message that waits so many units; or DelayTooLong.
        #: Remembered for as many as there are due times close to each other.
        self._way = lru_cache(maxsize=4096)(self._way_of)

    @classmethod
    def of(cls, message: FramedPublication, channel: Any) -> Learnt | None:
        publication = message.publication
        properties = publication.message.properties
        headers = properties.get("application_headers") or {}
        if HEADER not in headers or "BCC" in headers or "expires" in headers[HEADER]:
            return None
        try:
            template, fields = Template(properties), fields_of(publication)
            same = _is_made_by(template, fields, publication)
        except ValueError:
            return None
        opened = unwrap(properties, None)
        if not same or opened is None:
            return None
        delays = channel.delays
        return cls(template, message.to, delays.topology, opened[0], delays.recorder, fields.body)

    @staticmethod
    def headers_of(message: FramedPublication) -> Mapping[str, Any]:
        return message.publication.message.properties.get("application_headers") or {}

    def difference(self, message: FramedPublication, values: TaskValues) -> str:
        if message.to != self._to:
            return "its destination"
        publication = message.publication
        properties = publication.message.properties
        try:
            theirs = fields_of(publication)
        except ValueError:
            return "its headers"
        task_id, eta, argsrepr, kwargsrepr, body = values
        fields = theirs._replace(
            task_id=task_id, eta=eta, argsrepr=argsrepr, kwargsrepr=kwargsrepr, body=body
        )
        if _is_made_by(self._template, fields, publication):
            return ""
        opened = unwrap(properties, None)
        found = dict(opened[0] if opened else properties)
        return (
            differing("header", self._template.headers(fields), found.pop("application_headers"))
            or differing("property", self._properties_of(fields), found)
            or ("its body" if theirs.body != fields.body else "its bytes")
        )

    def another(
        self, channel: Any, ids: RandomIds, due_us: int, values: TaskValues
    ) -> FramedTask | None:
        topology = self._topology
        now_us = time_ns() // 1000
        units = units_until(due_us, now_us=now_us, resolution_ms=topology.resolution_ms)
        if not units:
            return None
        exchange, key = self._way(units)  # or DelayTooLong
        ttl_ms = topology.first_ttl_ms(units, remaining_us=due_us - now_us)
        expiration = "" if ttl_ms is None else str(ttl_ms)
        fields = TaskFields(exchange, key, *values, ids.hex(), milliseconds_up(due_us), expiration)
        if self._recorder is not None:
            headers = self._template.headers(fields)
            properties = {**self._properties_of(fields), "application_headers": headers}
            entry = Entry(properties, fields.body, *self._to)
            self._recorder.note(f"{fields.task_id}:{fields.delivery_id}", due_us, entry)
        return FramedTask(self._template, fields, self._to)

    def _properties_of(self, fields: TaskFields) -> dict[str, Any]:
        """The user's properties of a task, but for its headers."""
        return {**self._properties, "correlation_id": fields.task_id}

    def _way_of(self, units: int) -> tuple[str, str]:
        topology = self._topology
        check_reach(units, max_units=topology.max_units, resolution_ms=topology.resolution_ms)
        return topology.entry_exchange(units), topology.routing_key(units, self._address)


def _is_made_by(template: Template, fields: TaskFields, publication: Publication) -> bool:
    return template.frames(fields, **_SOMEWHERE) == frames_of(publication, **_SOMEWHERE)


def fields_of(publication: Publication) -> TaskFields:
    """The fields with which a template makes *publication* again; ValueError if it lacks one."""
    message = publication.message
    headers = message.properties["application_headers"]
    body = message.body
    try:
        return TaskFields(
            publication.exchange,
            publication.routing_key,
            headers["id"],
            headers["eta"],
            headers["argsrepr"],
            headers["kwargsrepr"],
            body.encode() if isinstance(body, str) else body,
            headers[HEADER]["id"],
            headers[HEADER]["due"],
            message.properties.get("expiration", ""),
        )
    except KeyError as exc:
        raise ValueError(f"expected a delayed Celery task with {exc}") from exc


class _Written:
    """A connection and its transport, as far as py-amqp's frame writer looks at them."""

    def __init__(self, frame_max: int) -> None:
        self.frame_max = frame_max
        self.bytes_sent = 0
        self.written: list[bytes] = []

    def write(self, data: Any) -> None:
        self.written.append(bytes(data))


def frames_of(publication: Publication, *, channel_id: int, frame_max: int) -> bytes:
    """The bytes that py-amqp writes for *publication*."""
    found = _Written(frame_max)
    write = frame_writer(found, found)
    exchange, key, mandatory = publication[1:]
    args = amqp.serialization.dumps("Bssbb", (0, exchange, key, mandatory, False))
    write(1, channel_id, amqp.spec.Basic.Publish, args, publication.message)
    return b"".join(found.written)

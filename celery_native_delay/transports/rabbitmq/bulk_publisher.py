"""Publishing many messages: one connection, confirms in a window, frames by template."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from time import monotonic, sleep, time_ns
from typing import Any, TypeVar

import amqp
from amqp.exceptions import ChannelError
from amqp.method_framing import frame_writer
from kombu import Producer
from kombu.exceptions import OperationalError

from ...due_time import check_reach, milliseconds_up, units_until
from ...errors import NativeDelayError
from ...message import HEADER
from ..difference import differing
from ..random_ids import RandomIds
from .channels import Publication
from .entry import Entry
from .outbox import Outbox, is_lasting
from .own_connection import LOST
from .recording import Recorder
from .routes import ROUTE_SECONDS
from .template import FramedTask, TaskFields, Template
from .topology import Topology
from .wrapping import unwrap

T = TypeVar("T")

#: Seconds to try on while there is no connection, counted from the first failure of an outage.
PATIENCE_SECONDS = 60.0


class Kind:
    """Tasks of one kind, sent without the long way; valid while the connection lives."""

    def __init__(
        self,
        template: Template,
        to: tuple[str, str],
        topology: Topology,
        properties: Mapping[str, Any],
        recorder: Recorder | None,
        body: bytes,
    ) -> None:
        self.template = template
        #: Of the task it was learnt from.
        self.body = body
        self.to = to
        self.topology = topology
        self._properties = {
            name: value for name, value in properties.items() if name != "application_headers"
        }
        self._recorder = recorder
        #: Until then the exchange is taken to lead where it did.
        self.valid_until_us = time_ns() // 1000 + round(ROUTE_SECONDS * 1_000_000)
        self._address = topology.address(*to)
        #: Entry exchange and routing key of a message that waits so many units; or DelayTooLong.
        #: Remembered for as many as there are due times close to each other.
        self.way = lru_cache(maxsize=4096)(self._way)

    def record(self, fields: TaskFields, due_us: int) -> None:
        """Note in the records, if any are kept, what is about to be sent."""
        if self._recorder is None:
            return
        headers = self.template.headers(fields)
        properties = {**self.properties_of(fields.task_id), "application_headers": headers}
        entry = Entry(properties, fields.body, *self.to)
        self._recorder.note(f"{fields.task_id}:{fields.delivery_id}", due_us, entry)

    def properties_of(self, task_id: str) -> dict[str, Any]:
        """The user's properties of a task, but for its headers."""
        return {**self._properties, "correlation_id": task_id}

    def _way(self, units: int) -> tuple[str, str]:
        topology = self.topology
        check_reach(units, max_units=topology.max_units, resolution_ms=topology.resolution_ms)
        return topology.entry_exchange(units), topology.routing_key(units, self._address)


class BulkPublisher:
    """A publisher of many messages over a connection of its own. For one thread."""

    def __init__(self, client: Any, *, window: int) -> None:
        """*client* is a kombu connection to the same broker, which is not touched."""
        self.outbox = Outbox(client, window)
        #: When the outage of now began, in seconds of the monotonic clock; None without one.
        self._away_since: float | None = None
        #: A :class:`~.transport.BulkChannel`.
        self._channel: Any = None
        self._ids = RandomIds()

    def publish(self, publish: Callable[[Any], object]) -> None:
        """Send one message the long way: *publish* gets a kombu producer.

        Raises what *publish* does, and OSError or an AMQPError if there has been no connection for
        :data:`PATIENCE_SECONDS`, however many calls ago that began, or there will be none.
        """

        def attempt() -> None:
            with self.outbox.lock:
                channel = self._ready_channel()
                channel.published = []
                try:
                    publish(Producer(channel, auto_declare=False))
                except OperationalError as exc:  # Celery's word for what is LOST
                    raise exc.__cause__ or exc from None

        self._patiently(attempt)

    @property
    def last_headers(self) -> Mapping[str, Any] | None:
        """Headers of the one message that was last sent the long way; None if it was not one."""
        last = self._last()
        return last and (last[0].message.properties.get("application_headers") or {})

    def learn(self) -> Kind | None:
        """The kind of the last message, for others like it; None if nothing can be learnt.

        A template is only used if it makes the very bytes that py-amqp does.
        """
        channel, last = self._channel, self._last()
        if channel is None or last is None:
            return None
        publication, (exchange, routing_key) = last
        headers = publication.message.properties.get("application_headers") or {}
        if HEADER not in headers or "BCC" in headers or "expires" in headers[HEADER]:
            return None
        try:
            template, fields = Template(publication.message.properties), fields_of(publication)
            same = self._is_made_by(template, fields, publication)
        except ValueError:
            return None
        opened = unwrap(publication.message.properties, None)
        if not same or opened is None:
            return None
        delays = channel.delays
        to = exchange, routing_key
        return Kind(template, to, delays.topology, opened[0], delays.recorder, fields.body)

    def difference(
        self, kind: Kind, task_id: str, eta: str, argsrepr: str, kwargsrepr: str, body: bytes
    ) -> str:
        """Parts of the last message that *kind* would have made otherwise, in words; "" if none."""
        last = self._last()
        if last is None:
            return "how many messages they are"
        publication, to = last
        if to != kind.to:
            return "its destination"
        properties = publication.message.properties
        try:
            theirs = fields_of(publication)
        except ValueError:
            return "its headers"
        fields = theirs._replace(
            task_id=task_id, eta=eta, argsrepr=argsrepr, kwargsrepr=kwargsrepr, body=body
        )
        if self._is_made_by(kind.template, fields, publication):
            return ""
        headers = kind.template.headers(fields)
        opened = unwrap(properties, None)
        found = dict(opened[0] if opened else properties)
        return (
            differing("header", headers, found.pop("application_headers"))
            or differing("property", kind.properties_of(task_id), found)
            or ("its body" if theirs.body != body else "its bytes")
        )

    def send(
        self,
        kind: Kind,
        due_us: int,
        task_id: str,
        eta: str,
        argsrepr: str,
        kwargsrepr: str,
        body: bytes,
    ) -> bool:
        """Send a task by its template; False if it is due already, or what was learnt is too old.

        Raises DelayTooLong, and as :meth:`publish` without a connection; it was not sent then.
        """
        topology = kind.topology
        now_us = time_ns() // 1000
        units = units_until(due_us, now_us=now_us, resolution_ms=topology.resolution_ms)
        if not units or now_us > kind.valid_until_us:
            return False
        way = kind.way(units)
        ttl_ms = topology.first_ttl_ms(units, remaining_us=due_us - now_us)
        fields = TaskFields(
            *way,
            task_id,
            eta,
            argsrepr,
            kwargsrepr,
            body,
            self._ids.hex(),
            milliseconds_up(due_us),
            "" if ttl_ms is None else str(ttl_ms),
        )
        kind.record(fields, due_us)
        framed = FramedTask(kind.template, fields, kind.to)
        try:
            self.outbox.send(framed)
        except LOST:
            self._patiently(lambda: self.outbox.send(framed))
        else:
            self._away_since = None
        return True

    def _last(self) -> tuple[Publication, tuple[str, str]] | None:
        published = [] if self._channel is None else self._channel.published
        return published[0] if len(published) == 1 else None

    def _is_made_by(self, template: Template, fields: TaskFields, publication: Publication) -> bool:
        where = {"channel_id": 7, "frame_max": self.outbox.connection.frame_max}
        return template.frames(fields, **where) == frames_of(publication, **where)

    def _ready_channel(self) -> Any:
        connection = self.outbox.connection
        if self._channel is None or self._channel.connection is not connection:
            self._channel = connection.bulk_channel(self.outbox)
        return self._channel

    def _patiently(self, attempt: Callable[[], T]) -> T:
        while True:
            try:
                done = attempt()
            except (ChannelError, NativeDelayError) as exc:
                self._channel = None  # it may be closed
                if isinstance(exc, ChannelError) and not self.outbox.is_connected:
                    self.outbox.has_given_up = True  # it is the connection that was refused
                raise
            except LOST as exc:
                now = monotonic()
                if self._away_since is None:
                    self._away_since = now
                if now - self._away_since > PATIENCE_SECONDS or is_lasting(exc):
                    self.outbox.has_given_up = True
                    raise
                self.outbox.lose()
                sleep(0.2)
            else:
                self._away_since = None
                return done


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

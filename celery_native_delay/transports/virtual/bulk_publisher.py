"""Publishing many messages: one connection, envelopes by template, sent in batches."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from time import time_ns
from typing import Any

from kombu import Producer

from ...due_time import milliseconds_up
from ..difference import differing
from ..random_ids import RandomIds
from .collecting import Put
from .outbox import Outbox
from .template import TaskFields, Template, fields_of

#: For so long an exchange is taken to lead where it did.
ROUTE_SECONDS = 60.0


class Kind:
    """Tasks of one kind, which are sent without the long way: like *put*."""

    def __init__(self, template: Template, put: Put, body: bytes) -> None:
        self.template = template
        self.put = put
        #: That of the task it was learnt from.
        self.body = body
        #: Until then the exchange is taken to lead where it did.
        self.valid_until_us = time_ns() // 1000 + round(ROUTE_SECONDS * 1_000_000)


class BulkPublisher:
    """A publisher of many messages through *outbox*. For one thread."""

    def __init__(self, outbox: Outbox[Any, Any]) -> None:
        self.outbox = outbox
        self._ids = RandomIds()
        self._last: list[Put] = []

    def publish(self, publish: Callable[[Any], object]) -> None:
        """Send one message the long way: *publish* gets a kombu producer.

        Raises what *publish* does, and one of :attr:`Outbox.lost` if there has been no connection
        for :data:`~.outbox.PATIENCE_SECONDS`; not sent.
        """

        def collect(channel: Any) -> Any:
            channel.collected, channel.returned = [], []
            publish(Producer(channel, auto_declare=False))
            return channel.collected, channel.returned

        with self.outbox.lock:
            self.outbox.make_room()
            self._last, returned = self.outbox.patiently(collect)
            self.outbox.refuse_returned(returned)
            for put in self._last:
                self.outbox.take(put)

    def learn(self) -> Kind | None:
        """The kind of the last message, for others like it; None if it teaches none.

        A template is only used if it makes the very envelope that the long way did.
        """
        put = self._one()
        if put is None or not put.due_us:
            return None
        text = text_of(put)
        envelope = json.loads(text)
        try:
            template, fields = Template(envelope), fields_of(envelope)
        except ValueError:
            return None
        return Kind(template, put, fields.body) if template.envelope(fields) == text else None

    @property
    def last_headers(self) -> Mapping[str, Any] | None:
        """Headers of the one message that was last sent the long way; None if it was not one."""
        put = self._one()
        return None if put is None else json.loads(text_of(put)).get("headers") or {}

    def difference(
        self, kind: Kind, task_id: str, eta: str, argsrepr: str, kwargsrepr: str, body: bytes
    ) -> str:
        """The part of the last message that *kind* would make otherwise, in words; "" if none."""
        put = self._one()
        if put is None:
            return "how many messages or queues they are"
        found = json.loads(text_of(put))
        try:
            theirs = fields_of(found)
        except ValueError:
            return "its headers"
        fields = TaskFields(
            task_id, eta, argsrepr, kwargsrepr, body, theirs.due_ms, theirs.delivery_tag
        )
        text = kind.template.envelope(fields)
        tag = theirs.delivery_tag
        if put == kind.put.another(text, due_us=put.due_us, task_id=task_id, delivery_tag=tag):
            return ""
        made = json.loads(text)
        return (
            differing("header", made.pop("headers"), found.pop("headers"))
            or differing("property", made.pop("properties"), found.pop("properties"))
            or differing("part", made, found)
            or "its destination"
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
        """Send a task by its template; False if only the long way will do.

        That is for a task that is due already, when what was learnt is too old, or the connection
        is gone. Raises as :meth:`publish`, and why it cannot wait; not sent.
        """
        now_us = time_ns() // 1000
        if due_us <= now_us or now_us > kind.valid_until_us:
            return False
        tag = self._ids.uuid()
        due_ms = milliseconds_up(due_us)
        fields = TaskFields(task_id, eta, argsrepr, kwargsrepr, body, due_ms, tag)
        envelope = kind.template.envelope(fields)
        put = kind.put.another(envelope, due_us=due_us, task_id=task_id, delivery_tag=tag)
        with self.outbox.lock:  # else the other thread may lose the connection in between
            channel = self.outbox.channel
            if channel is None or channel.connection is None:  # the long way connects again
                return False
            channel.delays.check_reach(due_us)
            self.outbox.make_room()
            self.outbox.take(put)
        return True

    def _one(self) -> Put | None:
        return self._last[0] if len(self._last) == 1 else None


def text_of(put: Put) -> str:
    """kombu's message in *put*, as JSON."""
    return put.envelope if isinstance(put.envelope, str) else put.envelope.decode()

"""A line of its own for many messages: one connection, envelopes by template, sent in batches."""

from __future__ import annotations

import json
from collections.abc import Callable
from time import time_ns
from typing import Any

from kombu import Producer

from ...core.due_time import milliseconds_up
from ...core.random_ids import RandomIds
from ..contract import Line
from .collecting import Put
from .outbox import Outbox
from .template import TaskFields, Template, fields_of

#: For so long an exchange is taken to lead where it did.
ROUTE_SECONDS = 60.0


class Kind:
    """How tasks of one kind are sent without the long way: like *put*."""

    def __init__(self, template: Template, put: Put) -> None:
        self.template = template
        self.put = put
        #: Until then the exchange is taken to lead where it did.
        self.valid_until_us = time_ns() // 1000 + round(ROUTE_SECONDS * 1_000_000)


class BulkLine(Line[Outbox[Any, Any]]):
    """See the module's docstring. For one thread."""

    def __init__(self, outbox: Outbox[Any, Any]) -> None:
        super().__init__(outbox)
        self._ids = RandomIds()
        self._last: list[Put] = []

    def publish(self, publish: Callable[[Any], object]) -> None:
        """Send one message the long way: *publish* gets a kombu producer.

        Raises:
            Whatever *publish* does; one of :attr:`Outbox.lost`: there has been no connection for
                :data:`~.outbox.PATIENCE_SECONDS`; not sent.
        """

        def collect(channel: Any) -> Any:
            channel.collected, channel.returned = [], []
            publish(Producer(channel, auto_declare=False))
            return channel.collected, channel.returned

        with self._outbox.lock:
            self._outbox.make_room()
            self._last, returned = self._outbox.patiently(collect)
            self._outbox.refuse_returned(returned)
            for put in self._last:
                self._outbox.take(put)

    def learn(self) -> Kind | None:
        """What the last message teaches about others of its kind; None if it does not.

        A template is only used if it makes the very envelope that the long way did.
        """
        if len(self._last) != 1 or not self._last[0].due_us:
            return None
        put = self._last[0]
        text = put.envelope if isinstance(put.envelope, str) else put.envelope.decode()
        envelope = json.loads(text)
        try:
            template = Template(envelope)
            same = template.envelope(fields_of(envelope)) == text
        except ValueError:
            return None
        return Kind(template, put) if same else None

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

        That is for a task that is due already, and when what was learnt is too old.

        Raises:
            NativeDelayError: it cannot wait; not sent.
            One of :attr:`Outbox.lost`: there has been no connection for a minute; not sent.
        """
        now_us = time_ns() // 1000
        channel = self._outbox.channel
        if due_us <= now_us or now_us > kind.valid_until_us or channel is None:
            return False
        channel.delays.check_reach(due_us)
        tag = self._ids.uuid()
        due_ms = milliseconds_up(due_us)
        fields = TaskFields(task_id, eta, argsrepr, kwargsrepr, body, due_ms, tag)
        envelope = kind.template.envelope(fields)
        put = kind.put.another(envelope, due_us=due_us, task_id=task_id, delivery_tag=tag)
        with self._outbox.lock:
            self._outbox.make_room()
            self._outbox.take(put)
        return True

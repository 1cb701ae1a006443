"""Publish many messages on one connection, without waiting for each confirm."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from base64 import b64encode
from collections.abc import Callable, Mapping, Sequence
from json.encoder import encode_basestring_ascii as as_json
from operator import itemgetter
from secrets import token_bytes, token_hex
from typing import Any, Self

from kombu import Producer

from ..now import time_ns
from .outbox import Outbox

#: Seconds until a template is made anew, because the bindings of its exchange may have changed.
ROUTE_SECONDS = 60.0

_IDS_AT_A_TIME = 256
_UUID_VARIANTS = "89ab"

#: Task id, ETA, argsrepr, kwargsrepr and body: the values that differ between similar tasks.
TaskValues = tuple[str, str, str, str, bytes]


class TaskTemplate(ABC):
    """An encoded task message, from which a bulk publisher makes the messages of similar tasks."""

    def __init__(self, body: bytes) -> None:
        #: The body of the task whose message became the template.
        self.body = body
        #: The time until which the template may be used, in microseconds since the epoch.
        self.valid_until_us = time_ns() // 1000 + round(ROUTE_SECONDS * 1_000_000)

    @classmethod
    @abstractmethod
    def of(cls, message: Any, channel: Any) -> Self | None:
        """Build a template from *message*; return None if no template can reproduce *message*."""

    @staticmethod
    @abstractmethod
    def headers_of(message: Any) -> Mapping[str, Any]:
        """Return the task headers of a message that a bulk publisher has encoded."""

    @abstractmethod
    def makes(self, message: Any, values: TaskValues) -> bool:
        """Return True if the template, filled with *values*, gives exactly *message*."""

    @abstractmethod
    def another(self, channel: Any, ids: RandomIds, due_us: int, values: TaskValues) -> Any:
        """Make another task's message, with a random id from *ids*; return None if already due."""


class Form:
    """A text with gaps for the values that differ between similar tasks."""

    def __init__(self, text: str, marks: Mapping[str, int]) -> None:
        """*marks* are random texts in *text*, each with the index of the value that fills it."""
        pieces = re.split(f"({'|'.join(map(re.escape, marks))})", text)
        self._form = "%s".join(piece.replace("%", "%%") for piece in pieces[::2])
        order = [marks[piece] for piece in pieces[1::2]]
        self._in_order: Callable[[Sequence[object]], tuple[object, ...]] = itemgetter(*order)

    def filled(self, values: Sequence[object]) -> str:
        return self._form % self._in_order(values)


def marked(headers: Mapping[str, Any], marks: Mapping[str, str]) -> dict[str, Any]:
    """Return a task's headers with *marks* in place of the values that differ between tasks."""
    names = ("root_id",) if headers.get("root_id") == headers["id"] else ()
    found = {**headers, **{name: marks[name] for name in ("eta", "argsrepr", "kwargsrepr")}}
    return found | dict.fromkeys(("id", *names), marks["task_id"])


#: Stands for the due time in a text: no message has this number.
_DUE_MARK = 8_970_163_845_120_771_093


class JsonTemplate(TaskTemplate):
    """Fills a task's values into the text of a similar task's message, which is JSON.

    A full encoding takes about 60 µs per message.
    """

    def __init__(
        self, body: bytes, marked_text: Callable[[dict[str, str], int], str], *, base64: bool
    ) -> None:
        """*marked_text* encodes the message with marks for its texts, and a number as due time.

        The marks are random texts, which no message contains. *base64* tells how its body is
        encoded.
        """
        super().__init__(body)
        self._base64 = base64
        names = ("task_id", "eta", "argsrepr", "kwargsrepr", "delivery_id", "body")
        marks = {name: f"{name} {token_hex(16)}" for name in names}
        texts = {f'"{marks[name]}"': at for at, name in enumerate(names[:5])}
        numbers = {marks["body"]: 5, str(_DUE_MARK): 6}
        self._form = Form(marked_text(marks, _DUE_MARK), texts | numbers)

    def filled(self, values: TaskValues, due: int, delivery_id: str) -> str:
        """Return the text of a message with these values, due time and delivery id."""
        task_id, eta, argsrepr, kwargsrepr, body = values
        return self._form.filled(
            (
                as_json(task_id),
                as_json(eta),
                as_json(argsrepr),
                as_json(kwargsrepr),
                as_json(delivery_id),
                b64encode(body).decode() if self._base64 else body.decode(),
                due,
            )
        )


class BulkPublisher:
    """Publishes many messages, and stores each message in memory until the broker's confirm."""

    def __init__(self, outbox: Outbox[Any, Any], template: type[TaskTemplate]) -> None:
        self.outbox = outbox
        self._template = template
        self._ids = RandomIds()
        #: The message of the last :meth:`publish`; None if it gave no or several messages.
        self._last: Any = None

    def publish(self, publish: Callable[[Any], object]) -> None:
        """Put the messages that the function *publish* publishes into the next batch.

        *publish* is called with a kombu producer that only collects messages. If this method
        raises an error, the broker gets none of the messages of this call.
        """

        def collect(channel: Any) -> Any:
            channel.collected, channel.returned = [], []
            publish(Producer(channel, auto_declare=False))
            return channel.collected, channel.returned

        with self.outbox.lock:
            self.outbox.make_room()
            collected, returned = self.outbox.patiently(collect)
            self._last = collected[0] if len(collected) == 1 else None
            self.outbox.refuse_returned(returned)
            for message in collected:
                self.outbox.take(message)

    @property
    def last_headers(self) -> Mapping[str, Any] | None:
        """The last message's task headers; None if :meth:`publish` gave no or several messages."""
        return None if self._last is None else self._template.headers_of(self._last)

    def learn(self) -> TaskTemplate | None:
        """Build a template from the task that :meth:`publish` published last.

        Returns None if :meth:`publish` gave no or several messages, or if no template can
        reproduce the task's message.
        """
        return None if self._last is None else self._template.of(self._last, self.outbox.channel)

    def made_by(self, template: TaskTemplate, values: TaskValues) -> bool:
        """Return True if *template*, filled with *values*, equals the last published message."""
        return self._last is not None and template.makes(self._last, values)

    def send(self, template: TaskTemplate, due_us: int, values: TaskValues) -> bool:
        """Publish a task's message: *template* with the task's *values* (id, ETA, arguments).

        Returns False if the task is due, *template* is too old, or the connection is lost. Then
        the caller must call :meth:`publish`. If this method raises an error, the broker does not
        get the task.
        """
        now_us = time_ns() // 1000
        if due_us <= now_us or now_us > template.valid_until_us:
            return False
        outbox = self.outbox
        with outbox.lock:  # else the other thread may lose the connection in between
            channel = outbox.channel
            if channel is None or channel.connection is None:  # publish() connects again
                return False
            outbox.make_room()
            if outbox.channel is not channel or channel.connection is None:
                return False  # lost while room was made
            message = template.another(channel, self._ids, due_us, values)
            if message is not None:
                outbox.take(message)
        return message is not None


class RandomIds:
    """Generates random ids; one system call gives the bytes for 256 ids. Not thread-safe."""

    def __init__(self) -> None:
        self._left: list[str] = []

    def hex(self) -> str:
        """Return 128 random bits as 32 hex digits."""
        if not self._left:
            many = token_bytes(16 * _IDS_AT_A_TIME).hex()
            self._left = [many[at : at + 32] for at in range(0, len(many), 32)]
        return self._left.pop()

    def uuid(self) -> str:
        """Return a random UUID, version 4 of RFC 9562."""
        bits = self.hex()
        variant = _UUID_VARIANTS[int(bits[16], 16) & 3]
        return f"{bits[:8]}-{bits[8:12]}-4{bits[13:16]}-{variant}{bits[17:20]}-{bits[20:]}"

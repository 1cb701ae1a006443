"""Shared code for bulk publishing on kombu's virtual transports."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, ClassVar, TypeVar

from billiard.exceptions import SoftTimeLimitExceeded

from ...errors import NativeDelayError, RefusedMessage
from .. import outbox
from ..outbox import OutboxBatch
from .collecting import CollectedMessage, Collecting, PlainMessage
from .template import refused_of

NOWHERE = "no queue is bound for it"

MessageT = TypeVar("MessageT", bound=CollectedMessage)
BatchT = TypeVar("BatchT", bound=OutboxBatch[Any])


class VirtualOutbox(outbox.Outbox[MessageT, BatchT]):
    """Stores a bulk publisher's messages in memory until the broker's confirm."""

    collecting: ClassVar[type[Collecting]]
    """The channel mixin that collects the published messages."""

    def __init__(self, client: Any, window: int) -> None:
        super().__init__(client, window)
        self._already_named: set[tuple[str | None, str | None]] = set()

    def refuse_returned(self, envelopes: list[bytes]) -> None:
        self._refused += [replace(each, returned=True) for each in self._named(NOWHERE, envelopes)]

    def _prepare(self, channel: Any) -> None:
        """Prepare the broker for the first send on a new channel; subclasses override this."""

    def _opened(self, client: Any) -> Collecting:
        delaying = client.transport.delaying_channel
        channel: Collecting = type("BulkChannel", (self.collecting, delaying), {})(
            client.connection
        )
        client.connection.channels.append(channel)
        self._prepare(channel)
        return channel

    def _reports(self, reason: str, puts: Iterable[MessageT]) -> list[RefusedMessage]:
        return self._named(reason, [put.envelope for put in puts])

    def _named(self, reason: str, envelopes: Iterable[str | bytes]) -> list[RefusedMessage]:
        """Report each message once, even if the broker refuses its copies for several queues."""
        messages = {
            (message.delivery_id, message.task_id): message
            for message in (refused_of(reason, envelope) for envelope in envelopes)
        }
        new = messages.keys() - self._already_named
        self._already_named |= new
        return [message for key, message in messages.items() if key in new]


class NotTaken(Exception):
    """Raised if the broker rejects a whole batch; then each message is sent alone."""


class CallingOutbox(VirtualOutbox[MessageT, OutboxBatch[MessageT]]):
    """Sends the messages of a bulk publisher with blocking calls."""

    @abstractmethod
    def _deliver(self, batch: OutboxBatch[MessageT]) -> None:
        """Send the messages of *batch*; remove confirmed and refused messages from *batch*."""

    def _put_plainly(self, put: PlainMessage) -> None:
        try:
            self.channel.put_plainly(put)
        except (*self.lost, SoftTimeLimitExceeded):
            raise
        except Exception as error:  # whatever a transport raises
            raise NotTaken(f"{type(error).__name__}: {error}") from error

    def _write(self) -> None:
        self._connect()
        while self._batches:
            batch, reason = self._batches[0], None
            try:
                self._deliver(batch)
            except NotTaken as exc:
                if len(batch.puts) > 1:  # one message may be the reason
                    self._batches.popleft()
                    self._batches.extendleft(OutboxBatch([put]) for put in reversed(batch.puts))
                    continue
                reason = str(exc)
            except self.lost:
                raise
            except NativeDelayError as exc:
                reason = str(exc)
            self._settled(batch, batch.puts, reason=reason)
            self._batches.popleft()

    def _settled(
        self, batch: OutboxBatch[MessageT], puts: Sequence[MessageT], *, reason: str | None = None
    ) -> None:
        """Remove messages from *batch*; if *reason* is given, report the messages as refused."""
        if reason is not None:
            self._refuse(reason, puts)
        self._unanswered -= len(puts)
        gone = {id(put) for put in puts}
        batch.puts = [put for put in batch.puts if id(put) not in gone]

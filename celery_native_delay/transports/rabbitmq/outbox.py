"""Publish many messages to RabbitMQ, 100 messages per socket write."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import chain
from typing import Any, TypeVar

from amqp.exceptions import AccessRefused, ChannelError, ConnectionError, NotAllowed, NotFound
from kombu.exceptions import OperationalError

from ...errors import RefusedMessage, StoreUnavailable, errors_ignored
from .. import outbox
from ..outbox import BATCH, OutboxBatch
from ..stored_bulk import StoredBatch, StoredMessage, packed, write
from .channels import NACKED, WindowChannel
from .template import FramedPublication, FramedTask
from .topology import is_delay_name

logger = logging.getLogger(__name__)

T = TypeVar("T")
Message = FramedPublication | FramedTask | StoredMessage


class SingleMessage(OutboxBatch[Message]):
    """A batch of one message, used to find the message that RabbitMQ refuses."""


class RabbitOutbox(outbox.Outbox[Message, OutboxBatch[Message]]):
    """Keeps the messages of a bulk publisher until RabbitMQ confirms the messages."""

    #: py-amqp raises AttributeError if the connection was lost meanwhile.
    lost = (ConnectionError, OSError, OperationalError, AttributeError, StoreUnavailable)

    def __init__(self, client: Any, window: int) -> None:
        super().__init__(client, window)
        #: The connection of py-amqp, and our channel in confirm mode.
        self._connection: Any = None
        self._confirming: WindowChannel | None = None
        #: The channel number and frame size that messages are encoded for.
        self._encoded_for = (0, 0)

    def take(self, put: Message) -> None:
        put.encode(*self._encoded_for)
        super().take(put)

    def patiently(self, attempt: Callable[[Any], T]) -> T:
        def on_open_channel(channel: Any) -> T:
            if channel.connection is None:  # the broker closed it for an earlier error
                channel = self.channel = self._connection.bulk_channel()
            try:
                return attempt(channel)
            except OperationalError as exc:  # Celery wraps other errors in it
                raise exc.__cause__ or exc from None
            except ChannelError as exc:
                confirming = self._confirming
                if confirming is None or confirming.closed_with is None:
                    raise
                # The broker refused an earlier message while *attempt* waited for an answer.
                self._send_each_alone(exc)
                self.channel = self._connection.bulk_channel()
                return attempt(self.channel)

        try:
            return super().patiently(on_open_channel)
        except OperationalError as exc:
            raise exc.__cause__ or exc from None

    def is_lasting(self, error: BaseException) -> bool:
        if isinstance(error, NotAllowed):
            text = str(error)
            return "limit (" not in text and "is down" not in text
        return isinstance(error, AccessRefused) or super().is_lasting(error)

    def give_up(self) -> list[RefusedMessage]:
        with self.lock:
            self._take_back_unconfirmed()
            return super().give_up()

    # --- sending and confirms ------------------------------------------------------------

    def _reports(self, reason: str, puts: Iterable[Message]) -> list[RefusedMessage]:
        return [put.refused(reason) for put in puts]

    def _packed(self, puts: list[Message]) -> Iterable[OutboxBatch[Message]]:
        stored, others = packed(puts)
        return (*stored, OutboxBatch(others)) if others else stored

    def _join(self, puts: list[Any]) -> dict[str, list[Any]]:
        self._connect()
        return write(self._connection.delays.store, puts)

    def _write(self) -> None:
        self._connect()
        while self._batches:
            if isinstance(self._batches[0], StoredBatch):
                self._write_rows(self._batches[0])
            elif isinstance(self._batches[0], SingleMessage):
                self._send_alone()
            else:
                self._process_answers(self._write_next)

    def _write_rows(self, batch: StoredBatch) -> None:
        store = self._connection.delays.store
        for reason, puts in write(store, batch.puts).items():
            self._refuse(reason, puts)
        self._batches.popleft()
        self._count()

    def _write_next(self, channel: WindowChannel) -> None:
        channel.send_all(self._batches.popleft().puts)
        channel.read_ready()

    def _read_down(self) -> None:
        most = self._window - self._batch_size
        while self._unanswered > most:
            self._write()
            self._process_answers(lambda channel: channel.read_down_to(most))

    def _read_ready(self, *, timeout_seconds: float = 0) -> None:
        def read(channel: WindowChannel) -> None:
            if channel.is_readable(timeout_seconds):
                channel.read_ready()

        self._process_answers(read)

    def _process_answers(self, attempt: Callable[[WindowChannel], None]) -> None:
        channel = self._confirming
        assert channel is not None
        try:
            attempt(channel)
        except ChannelError as exc:
            self._send_each_alone(exc)
            return
        self._refuse(NACKED, channel.take_nacked())
        returned = channel.take_returned()
        ours = [put for put in returned if is_delay_name(put.exchange)]
        others = [put for put in returned if not is_delay_name(put.exchange)]
        self._refuse("no queue is bound there (NO_ROUTE)", others, returned=True)
        # The level queues of these messages were deleted.
        self._batches.extendleft(SingleMessage([put]) for put in reversed(ours))
        self._count()
        if ours:
            self._declare_again()

    def _send_each_alone(self, error: ChannelError) -> None:
        """Find the message because of which the broker closed the channel."""
        # The confirms of the channel are lost, so some messages may arrive twice.
        self._take_back_unconfirmed(alone=True)
        self._open_confirming()
        if isinstance(error, NotFound):
            self._declare_again()

    def _send_alone(self) -> None:
        channel = self._confirming
        assert channel is not None
        if channel.unsettled_count:  # answers may also have arrived during a declaration
            self._process_answers(lambda channel: channel.read_down_to(0))
            return
        (put,) = self._batches.popleft().puts
        assert not isinstance(put, StoredMessage)
        reason = ""
        try:
            channel.send_all([put])
            channel.read_down_to(0)
        except ChannelError as exc:
            reason = str(exc.reply_text)
            self._open_confirming()
        if channel.take_nacked():
            reason = NACKED
        returned = channel.take_returned()
        if returned:
            reason = f"no queue is bound to {put.exchange}: see `celery -A PROJ delay doctor`"
        if reason:
            self._refuse(reason, [put], returned=bool(returned))
        self._count()

    def _refuse(self, reason: str, puts: Iterable[Message], *, returned: bool = False) -> None:
        refused = [replace(each, returned=returned) for each in self._reports(reason, puts)]
        if refused:
            logger.error(
                "native delay: %d message(s) not published, the first being %s; ids: %s",
                len(refused),
                refused[0],
                ", ".join(str(message.task_id or message.delivery_id) for message in refused),
            )
            self._refused += refused

    def _take_back_unconfirmed(self, *, alone: bool = False) -> None:
        channel, self._confirming = self._confirming, None
        if channel is not None:
            self._refuse(NACKED, channel.take_nacked())
            puts = [*channel.take_returned(), *channel.unconfirmed]
            kind, most = (SingleMessage, 1) if alone else (OutboxBatch, BATCH)
            starts = reversed(range(0, len(puts), most))
            self._batches.extendleft(kind(puts[at : at + most]) for at in starts)
        self._count()

    def _count(self) -> None:
        written = 0 if self._confirming is None else self._confirming.unsettled_count
        self._unanswered = written + sum(len(batch.puts) for batch in self._batches)

    def _declare_again(self) -> None:
        self._connection.delays.preparation.declare_again()

    # --- the connection ------------------------------------------------------------------

    def _connect(self) -> None:
        try:
            super()._connect()
        except ChannelError as exc:  # py-amqp raises it for a wrong password, too
            raise OperationalError(str(exc)) from exc

    def _opened(self, client: Any) -> Any:
        self._connection = client.connection
        channel = self._connection.bulk_channel()
        self._open_confirming()
        return channel

    def _open_confirming(self) -> None:
        self._confirming = WindowChannel(self._connection)
        encoded_for = self._confirming.channel_id, self._connection.frame_max
        if encoded_for != self._encoded_for:
            self._encoded_for = encoded_for
            for put in chain(self._held, *(batch.puts for batch in self._batches)):
                put.encode(*encoded_for)

    def _lose(self) -> None:
        self._take_back_unconfirmed()
        if self._client is not None:
            with errors_ignored():  # the connection may be lost
                self._connection.collect()
        super()._lose()

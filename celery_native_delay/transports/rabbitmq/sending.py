"""Sending with confirms in a window on one connection, and seeing to what the broker answers."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from amqp.exceptions import ChannelError, NotFound

from ...errors import RefusedMessage
from .channels import Sendable, WindowChannel
from .topology import is_delay_name

logger = logging.getLogger(__name__)

#: Confirms are looked for at every so many messages.
LOOK_EVERY = 64

NACKED = "the broker refused it (basic.nack)"


class Sender:
    """A sender on one connection; every message ends up confirmed, refused or still in doubt.

    What raises a connection error leaves everything unconfirmed to :meth:`take_in_doubt`.
    """

    def __init__(self, connection: Any, window: int) -> None:
        """*connection* is one of ours; its levels are declared again if they are gone."""
        self._connection = connection
        self._window = window
        self._channel: WindowChannel | None = None
        #: What the broker has to be asked again.
        self._again: deque[Sendable] = deque()
        self._refused: list[RefusedMessage] = []
        #: How many more may be sent before looking for answers; the window has room for them.
        self._unseen = 0

    @property
    def is_usable(self) -> bool:
        """True if the connection is not known to be dead."""
        connection = self._connection
        return bool(connection.channels is not None and connection.connected)

    @property
    def in_doubt_count(self) -> int:
        """Number of messages that are neither confirmed nor refused."""
        unconfirmed = 0 if self._channel is None else self._channel.unconfirmed_count
        return len(self._again) + unconfirmed

    @property
    def unwritten_seconds(self) -> float:
        """The time for which a message has waited to be written with others; 0 without one."""
        channel = self._channel
        return 0.0 if channel is None else channel.unwritten_seconds

    def send(self, message: Sendable) -> None:
        """Send without waiting, unless the window is full; in doubt from here on.

        If this raises, it was not sent: NativeDelayError, the levels are gone for good; or the
        connection is.
        """
        if self._unseen and self._channel is not None and self._channel.connection is not None:
            self._unseen -= 1
            self._channel.send(message)
            return
        while True:
            try:
                channel = self._open_channel()
                self._make_room(channel)
                channel.send(message)
                return
            except ChannelError as exc:
                self._after_refusal(exc)

    def look(self) -> None:
        """Take in what the broker has answered, without waiting; raises as :meth:`send`."""
        try:
            channel = self._open_channel()
            channel.read_ready()
            self._see_to_answers(channel)
        except ChannelError as exc:
            self._after_refusal(exc)

    def settle(self, *, deadline: float | None = None) -> None:
        """Return when nothing is in doubt; raises as :meth:`send`. *deadline* is monotonic."""
        while self.in_doubt_count:
            try:
                channel = self._open_channel()
                channel.read_down_to(0, deadline=deadline)
                self._see_to_answers(channel)
            except ChannelError as exc:
                self._after_refusal(exc)

    def take_refused(self) -> list[RefusedMessage]:
        """Messages that the broker did not take; each is told once, and has been logged."""
        refused, self._refused = self._refused, []
        return refused

    def take_in_doubt(self) -> list[Sendable]:
        """Messages neither confirmed nor refused, oldest first; none is kept here any more."""
        self._recall()
        in_doubt = list(self._again)
        self._again.clear()
        return in_doubt

    def _open_channel(self) -> WindowChannel:
        if self._channel is None or self._channel.connection is None:
            self._recall()
            self._channel = WindowChannel(self._connection)
        while self._again:
            self._channel.send(self._again[0])
            self._again.popleft()
        return self._channel

    def _make_room(self, channel: WindowChannel) -> None:
        channel.read_ready()
        if channel.unconfirmed_count >= self._window:
            channel.read_down_to(self._window - 1)
        self._see_to_answers(channel)
        self._unseen = min(LOOK_EVERY, self._window - channel.unconfirmed_count) - 1

    def _see_to_answers(self, channel: WindowChannel) -> None:
        self._refuse(channel.take_nacked(), NACKED)
        returned = channel.take_returned()
        ours = [message for message in returned if is_delay_name(message.exchange)]
        others = [message for message in returned if not is_delay_name(message.exchange)]
        self._refuse(others, "no queue is bound there (NO_ROUTE)", returned=True)
        if ours:
            # The queues that they were to wait in were deleted.
            self._again.extend(ours)
            self._connection.delays.preparation.declare_again()
            self._send_one_by_one(len(ours))

    def _after_refusal(self, exc: ChannelError) -> None:
        """The broker closed the channel for one of the messages: find out which it does not take.

        RabbitMQ forgets the confirms of a channel that it closes, so some may arrive twice.
        """
        if self._channel is None or self._channel.closed_with is None:
            raise exc  # another channel: while declaring, say
        self._recall()
        if isinstance(exc, NotFound):
            self._connection.delays.preparation.declare_again()
        self._send_one_by_one(len(self._again))

    def _send_one_by_one(self, count: int) -> None:
        """The first *count* of those to be sent again, each decided on before the next."""
        probe = WindowChannel(self._connection)
        for _ in range(count):
            message = self._again[0]
            reason = ""
            try:
                probe.send(message)
                probe.read_down_to(0)
            except ChannelError as exc:
                reason = str(exc.reply_text)
                probe = WindowChannel(self._connection)
            if probe.take_nacked():
                reason = NACKED
            returned = probe.take_returned()
            if returned:
                reason = f"{message.exchange} leads nowhere: see `celery -A PROJ delay verify`"
            self._again.popleft()
            if reason:
                self._refuse([message], reason, returned=bool(returned))
        probe.close()

    def _refuse(self, messages: Iterable[Sendable], reason: str, *, returned: bool = False) -> None:
        refused = [replace(message.refused(reason), returned=returned) for message in messages]
        if refused:
            logger.error(
                "native delay: %d message(s) not published, the first being %s; ids: %s",
                len(refused),
                refused[0],
                ", ".join(str(message.task_id or message.delivery_id) for message in refused),
            )
            self._refused += refused

    def _recall(self) -> None:
        """Keep what the channel left unconfirmed, to be sent again."""
        channel, self._channel = self._channel, None
        self._unseen = 0
        if channel is not None:
            self._refuse(channel.take_nacked(), NACKED)
            in_doubt = channel.take_returned() + channel.unconfirmed
            self._again.extendleft(reversed(in_doubt))

"""Many messages into a store: a hundred in a transaction, none twice whatever is lost on the way.

Each batch has a number, which the transaction that stores it writes down. One that is done again,
because its commit was not answered, finds its number and changes nothing: neither for a message
that still waits, nor for one that has been handed over since.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ...errors import StoreUnavailable
from ..lasting import is_lasting_sql
from ..outbox import Batch
from ..virtual.collecting import Collecting, PlainPut
from ..virtual.outbox import CallingOutbox, NotTaken
from .batch_numbers import NumberedBatches
from .delays import BROADCAST, Put
from .store import is_about_a_row


class StoreCollecting(Collecting):
    """A channel that collects messages as they are stored."""

    def put_for(self: Any, queue: str, message: dict[str, Any]) -> Put | PlainPut:
        due_us = self.due_of(message)
        if due_us is None:
            return PlainPut(queue, message)
        return self.delays.stored(message, queue, due_us=due_us)  # type: ignore[no-any-return]

    def put_for_all(
        self: Any, exchange: str, message: dict[str, Any], routing_key: str, *, due_us: int
    ) -> Put:
        return self.delays.stored(message, BROADCAST, due_us=due_us)  # type: ignore[no-any-return]


class Outbox(CallingOutbox[Put | PlainPut]):
    """Many messages into a store, a hundred in a transaction; others go to the broker as ever."""

    collecting = StoreCollecting

    def __init__(self, client: Any, window: int) -> None:
        super().__init__(client, window)
        self.lost = (*self.lost, StoreUnavailable, *client.recoverable_connection_errors)
        self._numbered: NumberedBatches | None = None
        #: Of the last batch that is stored.
        self._number = 0

    def is_lasting(self, error: BaseException) -> bool:
        return is_lasting_sql(error) or super().is_lasting(error)

    def _prepare(self, channel: Any) -> None:
        channel.delays.store.prepare()
        if self._numbered is None:
            batches = NumberedBatches(channel.delays.store)
            batches.open()
            self._numbered = batches

    def _packed(self, puts: list[Put | PlainPut]) -> Iterable[Batch[Put | PlainPut]]:
        waiting = [put for put in puts if isinstance(put, Put)]
        if waiting:
            yield Batch(waiting)
        for put in puts:
            if isinstance(put, PlainPut):
                yield Batch([put])

    def _deliver(self, batch: Batch[Put | PlainPut]) -> None:
        if isinstance(plain := batch.puts[0], PlainPut):  # the only one
            self._put_plainly(plain)
            return
        waiting = [put for put in batch.puts if isinstance(put, Put)]
        assert self._numbered is not None
        try:
            self._numbered.store(self._number + 1, waiting)
        except StoreUnavailable as error:
            if is_about_a_row(error):
                raise NotTaken(str(error)) from error
            raise
        self._number += 1
        self.channel.delays.watch()

    def _forget(self) -> None:
        if self._numbered is not None:
            self._numbered.close()

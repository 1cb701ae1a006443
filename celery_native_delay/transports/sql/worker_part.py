"""Code for workers whose delayed messages wait in a database: move due messages to queues."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ...errors import StoreUnavailable
from ...finding import WRONG, Finding
from ..interface import Rescue, Wait, WorkerPart
from .dispatcher import Dispatcher
from .handover import handing_over
from .store import Store
from .whole_files import is_folder

logger = logging.getLogger(__name__)


class StoreWorkerPart(WorkerPart):
    def prepare(self, where: str) -> str:
        """Create missing tables; return a sentence for the worker's log.

        If the database is unavailable, only log a warning. *where* is the broker's URL.
        """
        store: Store = self._delays.store
        try:
            store.prepare()
            census = store.census()
            found = f"{census.waiting} waiting, {census.parked} parked"
        except StoreUnavailable as exc:
            logger.warning("native delay: %s; it is asked again until it answers", exc)
            found = "their number is not known yet"
        return (
            f"{store.where} holds delayed tasks of {where}: {found}; "
            f"dispatching in this worker; {self.terms}"
        )

    def dangers(self) -> list[Finding]:
        """Report a problem if the filesystem transport reads and writes different folders."""
        if not is_folder(self._channel):
            return []
        out, into = self._channel.data_folder_out, self._channel.data_folder_in
        if Path(out).absolute() == Path(into).absolute():
            return []
        problem = (
            f"due messages go to data_folder_out, {out}, and this worker consumes from "
            f"data_folder_in, {into}"
        )
        way_out = "name the same folder twice in broker_transport_options"
        return [Finding("folders", WRONG, problem, way_out)]

    comes_back_late_seconds = 0.3  # other processes look for the message every 0.25 s

    def put_one_back(self, wait: Wait) -> None:
        self._delays.put_back(wait.on(wait.message._raw), wait.queue, due_us=wait.due_us)

    def rescue(self) -> Rescue:
        return rescue(self._channel, self._delays.store)

    def sweep(self) -> int:
        return int(self._delays.records.sweep())

    def promoter(self, connect: Callable[..., Any]) -> Dispatcher:
        return Dispatcher(self._delays.store, connect)


def rescue(channel: Any, store: Store) -> Rescue:
    """Publish parked (due, but so far undeliverable) messages again; return the counts."""
    outcome = Rescue()
    if not store.count_parked():
        return outcome
    after_id = 0
    with handing_over(channel, store) as hand_over:
        while True:
            with store.taking_parked(after_id=after_id) as batch:
                error = hand_over(batch, park=True)
            outcome.delivered += len(batch.delivered)
            outcome.still_parked += len(batch.refused)
            settled = [*batch.delivered, *(each["one"] for each in batch.refused)]
            if error is not None:
                raise error
            if not settled:
                return outcome
            after_id = max(settled)

"""The command line's part on brokers whose messages wait in a store: what all of them share."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ..interface import Backlog, ParkedTask
from .status import Census, Status
from .wrapping import unwrapped


@dataclass(frozen=True)
class Ready:
    """A report that nothing is missing: *facts* for scripts, *sentence* for people."""

    facts: Mapping[str, Any]
    sentence: str

    def as_json(self) -> dict[str, Any]:
        return dict(self.facts)

    def lines(self, table: Callable[..., str]) -> list[str]:
        return [self.sentence]


class AdminPart(ABC):
    """Counting for :class:`~celery_native_delay.transports.interface.AdminPart`."""

    name: str

    @abstractmethod
    def _census(self) -> Census:
        """The numbers of now."""

    def status(self) -> Status:
        return Status.of(self.name, self._census())

    def backlog(self) -> Backlog:
        """The store itself is the ledger."""
        census = self._census()
        return Backlog(
            census.waiting,
            census.parked,
            ledger_answers=True,
            until_first_us=census.until_first_us,
            in_ledger=census.waiting,
        )


def parked_task(envelope: str | bytes) -> ParkedTask:
    """The task in a parked message, as far as it tells who it is."""
    message = json.loads(envelope)
    return ParkedTask.of(*unwrapped(message.get("headers"), message["properties"]))

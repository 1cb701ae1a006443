"""The keeper of records: has a rule decide on what is there now, and does what it decides."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from ..records.interface import tried_again
from .rules import Rule, Seen, Step


class KeyRecords(ABC):
    """The records of one namespace on one broker.

    Every method may raise RecordsUnavailable or StoreUnavailable, and redis-py's own where the
    broker is Redis.
    """

    #: False if they have a connection of their own, and do not need that of their channel.
    needs_connection = False

    @abstractmethod
    def read(self, name: str) -> Seen:
        """The record of *name* as it is now, and which of its messages wait."""

    @abstractmethod
    def change(self, name: str, rule: Rule, put: Any = None) -> tuple[Seen, Step]:
        """The state that *rule* saw, and the step that it decided on, which is done in one.

        *put* makes the message that is put in, in terms of the broker; None: there is none.
        """


class ComparedRecords(KeyRecords):
    """Records that are read, and written if all is still as it was: else from the beginning."""

    @abstractmethod
    def write(self, name: str, seen: Seen, step: Step, put: Any) -> bool:
        """Do *step*, if all is as it was *seen*: else False, and nothing has changed."""

    def read_to_send(self, name: str) -> Seen:
        """The record as :meth:`read` has it; a message may be put in next."""
        return self.read(name)

    def leave(self, seen: Seen) -> None:
        """Undo what was prepared when it was *seen*: nothing is sent."""

    def change(self, name: str, rule: Rule, put: Any = None) -> tuple[Seen, Step]:
        def attempt() -> tuple[Seen, Step] | None:
            seen = self.read(name) if put is None else self.read_to_send(name)
            step = rule(seen)
            if step.due_us is None and step.record == seen.record:
                self.leave(seen)
                return seen, step
            return (seen, step) if self.write(name, seen, step, put) else None

        return tried_again(name, attempt)

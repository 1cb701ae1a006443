"""The records of keys: has a rule decide on what is there now, and does what it decides."""

from __future__ import annotations

from functools import partial

from ..records.interface import Change, Looked, Put, RecordName, Records
from .record import Record
from .rules import Rule, Seen, Step


class KeyRecords:
    """The keys in *records*. Methods raise what those raise while they are away."""

    def __init__(self, records: Records) -> None:
        self._records = records
        self.needs_connection = records.needs_connection

    def read(self, name: str) -> Seen:
        """The record of *name* as it is now, and which of its messages wait."""
        return _seen(self._records.read(_name_of(name)))

    def change(self, name: str, rule: Rule, put: Put | None = None) -> tuple[Seen, Step]:
        """The state that *rule* saw, and the step that it decided on, which is done in one.

        *put* makes the message that is put in; None: there is none.
        """
        return self._records.change(_name_of(name), partial(_decided, rule), put)


def _name_of(name: str) -> RecordName:
    return RecordName("key", name)


def _seen(looked: Looked) -> Seen:
    record = None if looked.text is None else Record.decoded(looked.text)
    return Seen(looked.now_us, record, looked.messages)


def _decided(rule: Rule, looked: Looked) -> Change[tuple[Seen, Step]]:
    seen = _seen(looked)
    step = rule(seen)
    text = looked.text
    if step.record != seen.record:
        text = None if step.record is None else step.record.encoded()
    return Change(text, step.kept_us, (seen, step), step.due_us, step.replaces)

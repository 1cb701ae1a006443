"""Reads and changes the stored state of debounce, throttle and unique keys."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from ..records.interface import Change, Publish, RecordName, Records, Snapshot
from ..records.publishing import Collect, RecordedPublish
from . import rules
from .record import Mark, Record
from .rules import Rule, Seen, Step


class KeyRecords:
    """Reads and changes the stored state of debounce, throttle and unique keys."""

    def __init__(self, records: Records) -> None:
        self._records = records
        self.needs_connection = records.needs_connection

    def read(self, name: str) -> Seen:
        """Read the state of a debounce, throttle or unique key, and its task's waiting messages."""
        return _seen(self._records.read(_name_of(name)))

    def change(self, name: str, rule: Rule, publish: Publish | None = None) -> tuple[Seen, Step]:
        """Change the state of a debounce, throttle or unique key.

        The pure function *rule* computes the new state, and decides whether *publish* publishes a
        message in the same step. Returns the old state, and the result of *rule*.
        """
        return self._records.change(_name_of(name), partial(_decided, rule), publish)


def keep_key(records: Records, headers: Mapping[str, Any], *, due_us: int, now_us: int) -> None:
    """Keep the key of a task that waits again, if it would be forgotten before *due_us*."""
    if not rules.is_far(due_us, now_us) or (mark := Mark.of(headers)) is None:
        return
    KeyRecords(records).change(
        mark.name, partial(rules.keep, task_id=headers.get("id"), due_us=due_us)
    )


def publish_under(
    name: str, rule: Rule, task_id: str, collect: Collect | None = None
) -> RecordedPublish:
    """Return an object that publishes a task and changes the stored state of the task's key."""
    return RecordedPublish(task_id, _name_of(name), partial(_decided, rule), collect=collect)


def _name_of(name: str) -> RecordName:
    return RecordName("key", name)


def _seen(snapshot: Snapshot) -> Seen:
    record = None if snapshot.text is None else Record.decoded(snapshot.text)
    return Seen(snapshot.now_us, record, snapshot.messages)


def _decided(rule: Rule, snapshot: Snapshot) -> Change[tuple[Seen, Step]]:
    seen = _seen(snapshot)
    step = rule(seen)
    text = snapshot.text
    if step.record != seen.record:
        text = None if step.record is None else step.record.encoded()
    return Change(text, step.kept_us, (seen, step), step.due_us, step.replaces)

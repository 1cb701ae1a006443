"""Records of keys, as they lie beside what waits. Pure.

Rule: what a record holds is decided here alone; a change in it is a new VERSION.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

from ..errors import TopologyMismatch

VERSION = 1

#: The header of a message whose task is the only one under its key: ``{"v", "key", "until"}``.
HEADER = "native_delay_unique"

#: A longer name of a record is its beginning and a digest.
LONGEST_NAME = 200

#: json.dumps() with separators makes an encoder for each call.
_as_json = json.JSONEncoder(separators=(",", ":")).encode


@dataclass(frozen=True)
class Run:
    """A task that runs under its key, one attempt of it, and until when that is believed.

    *lease_us* counts from the epoch by the clock of whatever keeps the record, as all times here.
    """

    id: str
    token: str
    lease_us: int


@dataclass(frozen=True)
class Record:
    """The state of one key; nothing of it is set that its kind does not need.

    *id* is the task that waits for it, until *due_us*. *since_us* is when the first of the calls
    came that it stands for. *window_us* is the end of a window that task *opener* has opened. *run*
    is what runs.
    """

    id: str | None = None
    due_us: int = 0
    since_us: int = 0
    window_us: int = 0
    opener: str | None = None
    run: Run | None = None

    def encoded(self) -> str:
        """The record as JSON, always the same text for an equal one."""
        fields: dict[str, Any] = {"v": VERSION}
        for name in ("id", "due_us", "since_us", "window_us", "opener"):
            if value := getattr(self, name):
                fields[name] = value
        if self.run is not None:
            fields["run"] = [self.run.id, self.run.token, self.run.lease_us]
        return _as_json(fields)

    @classmethod
    def decoded(cls, text: str | bytes) -> Record:
        """The opposite of :meth:`encoded`; TopologyMismatch for another version."""
        fields = json.loads(text)
        if fields.pop("v", None) != VERSION:
            raise TopologyMismatch(
                f"expected the record of a key in version {VERSION}, got {text!r}: use the release "
                f"of celery_native_delay that has made it in all producers and workers"
            )
        run = fields.pop("run", None)
        return cls(**fields, run=None if run is None else Run(*run))


def name_of(kind: str, task: str, key: str) -> str:
    """The name of the record of *key*, which one task has for itself in each kind of call."""
    name = f"{kind}:{task}:{key}"
    if len(name.encode()) <= LONGEST_NAME:
        return name
    digest = blake2b(name.encode(), digest_size=16).hexdigest()
    return f"{name.encode()[:120].decode(errors='ignore')}…{digest}"

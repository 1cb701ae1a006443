"""Records of keys, as they lie beside what waits. Pure.

Rule: what a record holds is decided here alone; a change in it is a new VERSION.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

from ..errors import TopologyMismatch
from ..texts import is_text

VERSION = 1

#: The header of a message that was published under a key: a :class:`Mark`.
HEADER = "native_delay_key"

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


@dataclass(frozen=True)
class Mark:
    """The header of a message that was published under a key: which call, of which task and key.

    *kind* is ``debounce``, ``throttle``, ``throttle-trailing`` or ``unique``. *until* is set for
    unique tasks, and *token* for their attempt that has the key, from the gate on.
    """

    kind: str
    task: str
    key: str
    until: str | None = None
    token: str | None = None

    @property
    def name(self) -> str:
        """The name of the record of the key."""
        return name_of(self.kind, self.task, self.key)

    def header(self) -> dict[str, Any]:
        """The header; it leaves out the task, whose name Celery's own header has."""
        said = {"v": VERSION, "kind": self.kind, "key": self.key}
        return said | {name: value for name in _OPTIONAL if (value := getattr(self, name))}

    @classmethod
    def of(cls, headers: Mapping[str, Any] | None) -> Mark | None:
        """The mark among the *headers* of a task; None if there is none that can be read."""
        header = headers.get(HEADER) if headers else None
        if not isinstance(header, Mapping) or header.get("v") != VERSION:
            return None
        assert headers is not None
        required = [header.get("kind"), headers.get("task"), header.get("key")]
        optional = [header.get(name) for name in _OPTIONAL]
        if not all(is_text(each) for each in (*required, *filter(None, optional))):
            return None
        return cls(*required, *optional)  # type: ignore[arg-type]


_OPTIONAL = ("until", "token")


def key_and_kind(headers: Mapping[str, Any]) -> tuple[str, str]:
    """The key and the kind of call that these *headers* of a task tell; "" for no such call."""
    mark = Mark.of(headers)
    return (mark.key, mark.kind) if mark else ("", "")


def name_of(kind: str, task: str, key: str) -> str:
    """The name of the record of *key*, which one task has for itself in each kind of call."""
    name = f"{kind}:{task}:{key}"
    if len(name.encode()) <= LONGEST_NAME:
        return name
    digest = blake2b(name.encode(), digest_size=16).hexdigest()
    return f"{name.encode()[:120].decode(errors='ignore')}…{digest}"

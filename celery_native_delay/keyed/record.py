"""The stored state of a debounce, throttle or unique key, and the header of its message.

A change in the content of the state needs a new VERSION.
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

#: Bytes. A longer name of a record is shortened to its beginning and a digest.
LONGEST_NAME = 200

#: json.dumps() with separators makes an encoder for each call.
_as_json = json.JSONEncoder(separators=(",", ":")).encode


@dataclass(frozen=True)
class Run:
    """A running attempt of a task, with the lease that keeps the task's key.

    *id* is the task's id. *token* is the attempt's own id. The lease ends at *lease_us*, and began
    at *since_us* if the key allows several runs. Times are in microseconds since the epoch by the
    clock of the Redis or database.
    """

    id: str
    token: str
    lease_us: int
    since_us: int = 0


@dataclass(frozen=True)
class Record:
    """The stored state of one debounce, throttle or unique key.

    Times are in microseconds since the epoch. *id* is the id of the waiting task, due at *due_us*.
    *since_us* is the time of the first of the calls that share this task. A throttle's window ends
    at *window_us*, and *opener* is the id of the task that began the window. *run* is the running
    attempt of a unique task. *runs* are the running tasks of a key that allows several. These
    tasks took about *took_us*, and the last waiting task asks again at *asks_us*.
    """

    id: str | None = None
    due_us: int = 0
    since_us: int = 0
    window_us: int = 0
    opener: str | None = None
    run: Run | None = None
    runs: tuple[Run, ...] = ()
    took_us: int = 0
    asks_us: int = 0

    @property
    def tokens(self) -> set[str]:
        """The tokens of all running attempts."""
        return {run.token for run in (self.run, *self.runs) if run is not None}

    def encoded(self) -> str:
        """Return the state of the key as JSON. Equal states give equal texts."""
        fields: dict[str, Any] = {"v": VERSION}
        for name in ("id", "due_us", "since_us", "window_us", "opener", "took_us", "asks_us"):
            if value := getattr(self, name):
                fields[name] = value
        if self.run is not None:
            fields["run"] = [self.run.id, self.run.token, self.run.lease_us]
        if self.runs:
            fields["runs"] = [[run.id, run.token, run.lease_us, run.since_us] for run in self.runs]
        return _as_json(fields)

    @classmethod
    def decoded(cls, text: str | bytes) -> Record:
        """Parse the stored JSON of a key's state. Raises TopologyMismatch for another version."""
        fields = json.loads(text)
        if fields.pop("v", None) != VERSION:
            raise TopologyMismatch(
                f"expected the record of a key in version {VERSION}, got {text!r}: use the release "
                f"of celery_native_delay that has made it in all producers and workers"
            )
        run = fields.pop("run", None)
        runs = tuple(Run(*each) for each in fields.pop("runs", ()))
        return cls(**fields, run=None if run is None else Run(*run), runs=runs)


@dataclass(frozen=True)
class Mark:
    """The header of a message with a debounce, throttle or unique key.

    *kind* is ``debounce``, ``throttle``, ``throttle-trailing`` or ``unique``. *task* is the name of
    the task. A unique task also has *until*, "start" or "end". *token* is the id of a running
    attempt.
    """

    kind: str
    task: str
    key: str
    until: str | None = None
    token: str | None = None

    @property
    def name(self) -> str:
        """The name under which the state of this key is stored."""
        return name_of(self.kind, self.task, self.key)

    def header(self) -> dict[str, Any]:
        """Return the header's content, without the task's name, which Celery's own header has."""
        said = {"v": VERSION, "kind": self.kind, "key": self.key}
        return said | {name: value for name in _OPTIONAL if (value := getattr(self, name))}

    @classmethod
    def of(cls, headers: Mapping[str, Any] | None) -> Mark | None:
        """Parse the header of a debounce, throttle or unique key, or return None."""
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
    """Return the key and its kind, such as "debounce", in a message's *headers*, or "" and ""."""
    mark = Mark.of(headers)
    return (mark.key, mark.kind) if mark else ("", "")


def name_of(kind: str, task: str, key: str) -> str:
    """Return the name under which the state of a task's *key* is stored."""
    name = f"{kind}:{task}:{key}"
    if len(name.encode()) <= LONGEST_NAME:
        return name
    digest = blake2b(name.encode(), digest_size=16).hexdigest()
    return f"{name.encode()[:120].decode(errors='ignore')}…{digest}"

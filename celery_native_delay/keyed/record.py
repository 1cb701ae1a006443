"""The stored state of a debounce, throttle or unique key, and the message header that has the key.

Increase VERSION when the data format changes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

from ..errors import TopologyMismatch
from ..records.waiting import number_of
from ..texts import is_text, storable

VERSION = 1

#: The header of a message that was published under a key: a :class:`Mark`.
HEADER = "native_delay_key"

#: The header of a task that holds shared locks (``concurrent``): for each lock, the name of the key
#: and the id of the execution.
LOCKS = "native_delay_locks"

#: The argument in which a task gets the calls that a debounce has collected.
CALLS = "calls"

#: The longest name of a stored state in bytes. A longer name becomes its beginning and a digest.
LONGEST_NAME = 200

#: One encoder for all calls: json.dumps() with separators would make an encoder for each call.
_as_json = json.JSONEncoder(separators=(",", ":")).encode


@dataclass(frozen=True)
class Run:
    """An execution of a task, which holds a lock of the task's key.

    *token* is a random id of the execution. *lease_us* is the expiry of the lock in microseconds
    since the epoch, by the clock of the Redis or database. *since_us* is the time when the
    execution got the lock of a concurrent key; 0 for other keys.
    """

    id: str
    token: str
    lease_us: int
    since_us: int = 0


@dataclass(frozen=True)
class Record:
    """The stored state of one debounce, throttle, unique or concurrent key.

    A concurrent key lets a limited number of executions run at the same time.

    - *id* and *due_us*: the id and the due time of the waiting task. For a concurrent key, *due_us*
      is the time at which the last waiting task tries again.
    - *since_us*: the time of the first debounce call for the waiting task.
    - *window_us*: the end of a throttle's window.
    - *opener*: the id of the task that began a throttle's window; of a debounce that collects
      calls, a random id of the last call.
    - *runs*: the executions that now have a lock of a unique or concurrent key.
    - *calls*: the number of calls that the waiting task of a debounce has collected.

    All times are in microseconds since the epoch. Unset times are 0. Other unset fields
    are None.
    """

    id: str | None = None
    due_us: int = 0
    since_us: int = 0
    window_us: int = 0
    opener: str | None = None
    runs: tuple[Run, ...] = ()
    calls: int = 0

    @property
    def run(self) -> Run | None:
        return self.runs[0] if self.runs else None

    def run_of(self, token: str) -> Run | None:
        return next((run for run in self.runs if run.token == token), None)

    def encoded(self) -> str:
        """Return the state of the key as JSON. Equal states give equal JSON."""
        fields: dict[str, Any] = {"v": VERSION}
        for name in ("id", "due_us", "since_us", "window_us", "opener", "calls"):
            if value := getattr(self, name):
                fields[name] = value
        if self.runs:
            fields["runs"] = [[run.id, run.token, run.lease_us, run.since_us] for run in self.runs]
        return _as_json(fields)

    @classmethod
    def decoded(cls, text: str | bytes) -> Record:
        """Parse the JSON of a key's state. Raises TopologyMismatch for an unknown version."""
        fields = json.loads(text)
        if fields.pop("v", None) != VERSION:
            raise TopologyMismatch(
                f"expected the record of a key in version {VERSION}, got {text!r}: use the release "
                f"of celery_native_delay that has made it in all producers and workers"
            )
        return cls(**fields | {"runs": tuple(Run(*run) for run in fields.get("runs", ()))})


@dataclass(frozen=True)
class Mark:
    """The header of a message with a debounce, throttle or unique key.

    - *kind*: "debounce", "unique", "throttle-trailing" (``throttle(edge="trailing")``), or
      "throttle" (the other edges).
    - *task*: the name of the task.
    - *until*: the event of the task that frees a unique key, "start" or "end". None for other
      kinds.
    - *token*: the id of a unique task's execution. None until a worker receives the task, and for
      other kinds.
    """

    kind: str
    task: str
    key: str
    until: str | None = None
    token: str | None = None

    @property
    def name(self) -> str:
        """The name under which the state of the key is stored."""
        return name_of(self.kind, self.task, self.key)

    def header(self) -> dict[str, Any]:
        """Return the message header that marks a task with this key."""
        said = {"v": VERSION, "kind": self.kind, "key": self.key}
        return said | {name: value for name in _OPTIONAL if (value := getattr(self, name))}

    @classmethod
    def of(cls, headers: Mapping[str, Any] | None) -> Mark | None:
        """Parse the header of a message. Returns None if the message has no key."""
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
    """Return the key and its kind from a message's headers, or ("", "") without a key."""
    mark = Mark.of(headers)
    return (mark.key, mark.kind) if mark else ("", "")


def name_of(kind: str, task: str, key: str) -> str:
    """Return the name of a key's stored state. Long names end in a hash."""
    name = f"{kind}:{task}:{key}"
    if len(name.encode()) <= LONGEST_NAME:
        return name
    digest = blake2b(name.encode(), digest_size=16).hexdigest()
    return f"{name.encode()[:120].decode(errors='ignore')}…{digest}"


def name_of_once(task: str, task_id: str, retries: object) -> str:
    """The name under which the claim of a task that is ``once`` is stored."""
    return name_of("once", storable(task), f"{storable(task_id)}:{number_of(retries)}")


def has_run_once(text: str | None) -> bool:
    """Return True if this claim, which is stored and has not expired, is of a task that ran."""
    return text is not None and Record.decoded(text).opener is not None

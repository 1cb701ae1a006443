"""Notes in the ledger's streams: entries, decisions, marks and purges. Pure.

A stream keeps messages as AMQP 1.0, and RabbitMQ 3.10 drops headers that are tables or arrays on
the way: what is to be read again is a string, a number, or in the body.

Rule 3 of ``topology.py`` holds here, too: what is written stays for years, so a change is a
new version.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import amqp

#: The header that says what a message in a stream is, and its version.
_KIND = "native_delay_note"

#: py-amqp sends a frame for an empty body, at which RabbitMQ closes the connection.
_NO_BODY = b"-"


@dataclass(frozen=True, slots=True)
class Noted:
    """A delivery that waits, due in µs since the epoch. What was published is the body.

    One that *replaces* another is a copy, and counts when a decision says so.
    """

    delivery_id: str
    due_us: int
    replaces: str | None = None

    def headers(self) -> dict[str, Any]:
        headers = {_KIND: "entry.1", "id": self.delivery_id, "due": self.due_us}
        return headers if self.replaces is None else headers | {"replaces": self.replaces}


@dataclass(frozen=True, slots=True)
class Decision:
    """The delivery *new* takes the place of *old*. Due times are in ms since the epoch."""

    old: str
    new: str
    old_due_ms: int
    new_due_ms: int

    @property
    def last_due_ms(self) -> int:
        """The time from which on neither of the two waits."""
        return max(self.old_due_ms, self.new_due_ms)

    def headers(self) -> dict[str, Any]:
        due = {"old_due": self.old_due_ms, "new_due": self.new_due_ms}
        return {_KIND: "decision.1", "old": self.old, "new": self.new} | due


@dataclass(frozen=True, slots=True)
class Mark:
    """The end of what was there when *token* was written, for the reader that finds it."""

    token: str

    def headers(self) -> dict[str, Any]:
        return {_KIND: "mark.1", "token": self.token}


@dataclass(frozen=True, slots=True)
class Purge:
    """Of what stands before, nothing waits any more."""

    def headers(self) -> dict[str, Any]:
        return {_KIND: "purge.1"}


Note = Noted | Decision | Mark | Purge


def note_of(headers: Mapping[str, Any]) -> Note | None:
    """The note that these headers are; None for one that a later version has written."""
    match headers.get(_KIND):
        case "entry.1":
            return Noted(headers["id"], headers["due"], headers.get("replaces"))
        case "decision.1":
            due = headers["old_due"], headers["new_due"]
            return Decision(headers["old"], headers["new"], *due)
        case "mark.1":
            return Mark(headers["token"])
        case "purge.1":
            return Purge()
    return None


def note_message(note: Note, body: bytes = _NO_BODY) -> amqp.Message:
    """The message that carries a note."""
    return amqp.Message(body, application_headers=note.headers(), delivery_mode=2)

"""Decides which release's schedule entries are published: the newest configuration wins."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from hashlib import blake2b
from typing import NamedTuple

from ..records.interface import Change, Snapshot
from .entry import Entry
from .state import KEPT_US


@dataclass(frozen=True)
class Release:
    """The names of a release's schedule entries, and a digest of these entries."""

    version: str = ""
    digest: str = ""
    names: tuple[str, ...] = ()

    @classmethod
    def of(cls, version: int | str | None, entries: Mapping[str, Entry]) -> Release:
        # Texts compare as numbers and as dates do.
        comparable = f"{version:020d}" if isinstance(version, int) else version or ""
        texts = "".join(entries[name].text for name in sorted(entries))
        digest = blake2b(texts.encode(), digest_size=8).hexdigest()
        return cls(comparable, digest, tuple(sorted(entries)))

    @classmethod
    def from_text(cls, text: str | None) -> Release:
        made = {} if text is None else json.loads(text)
        return cls(made.get("version", ""), made.get("digest", ""), tuple(made.get("names", ())))


class InForce(NamedTuple):
    """The *names* of the entries that are published, and the names that a new release *removed*.

    *is_ours* is True if the entries of this worker are published.
    """

    names: tuple[str, ...]
    is_ours: bool
    removed: tuple[str, ...] = ()


def taken_over(snapshot: Snapshot, *, ours: Release, is_new: bool) -> Change[InForce]:
    """Let the release *ours* be published, unless the stored release is newer.

    Of equal versions, the worker wins that has just started or read changed entries (*is_new*).
    """
    stored = Release.from_text(snapshot.text)
    is_same = ours.version == stored.version and (is_new or ours.digest == stored.digest)
    if stored.digest and not is_same and ours.version <= stored.version:
        return Change(snapshot.text, 0, InForce(stored.names, False))
    removed = tuple(name for name in stored.names if name not in ours.names)
    text = json.dumps(asdict(ours))
    return Change(text, snapshot.now_us + KEPT_US, InForce(ours.names, True, removed))

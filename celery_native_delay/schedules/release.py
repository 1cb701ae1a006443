"""Chooses an app's newest release; workers publish only this release's periodic tasks."""

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
    """An app's release: the version, and the names and digest of the schedule entries."""

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
    """The names of the newest release's schedule entries.

    *is_ours* is True if this worker has the newest release. *removed* has the names of the
    schedule entries that only the previously stored release had.
    """

    names: tuple[str, ...]
    is_ours: bool
    removed: tuple[str, ...] = ()


def taken_over(snapshot: Snapshot, *, ours: Release, is_new: bool) -> Change[InForce]:
    """Choose the app's newer release: *ours* (this worker's release) or the stored release.

    A release is the app's version and its schedule entries. The release with the higher version
    is newer. If both have the same version but different schedule entries, *ours* is chosen if
    *is_new* is True, else the stored release. *is_new* is True if the worker has just started, or
    if the worker's schedule entries have changed.
    """
    stored = Release.from_text(snapshot.text)
    is_same = ours.version == stored.version and (is_new or ours.digest == stored.digest)
    if stored.digest and not is_same and ours.version <= stored.version:
        return Change(snapshot.text, 0, InForce(stored.names, False))
    removed = tuple(sorted({*stored.names}.difference(ours.names)))
    text = json.dumps(asdict(ours))
    return Change(text, snapshot.now_us + KEPT_US, InForce(ours.names, True, removed))

"""Chooses an app's newest release; workers publish only this release's periodic tasks."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from hashlib import blake2b
from typing import NamedTuple

from ..records.interface import Change, Snapshot
from .entry import ScheduleEntry
from .state import KEPT_US

#: The time since the last look of a worker is stored to the nearest 15 s.
LOOKED_EVERY_US = 15_000_000

#: If no worker of an app has looked after its entries for an hour, workers of other apps drop them.
GONE_US = 3_600_000_000

#: Two configurations of one app that run for longer than five minutes are no deployment any more.
RIVAL_US = 300_000_000

#: A rival's record expires if its workers have not looked for 90 s.
_RIVAL_KEPT_US = 90_000_000


@dataclass(frozen=True)
class Release:
    """An app's release: the version, and the names and digest of the schedule entries.

    *looked_us* is the time when one of the app's workers last looked after the entries.
    """

    version: str = ""
    digest: str = ""
    names: tuple[str, ...] = ()
    looked_us: int = field(default=0, compare=False)

    @classmethod
    def of(cls, version: int | str | None, entries: Mapping[str, ScheduleEntry]) -> Release:
        # Texts compare as numbers and as dates do.
        comparable = f"{version:020d}" if isinstance(version, int) else version or ""
        texts = "".join(entries[name].text for name in sorted(entries))
        digest = blake2b(texts.encode(), digest_size=8).hexdigest()
        return cls(comparable, digest, tuple(sorted(entries)))

    @classmethod
    def from_text(cls, text: str | None) -> Release:
        made = {} if text is None else json.loads(text)
        names, looked_us = tuple(made.get("names", ())), made.get("looked_us", 0)
        return cls(made.get("version", ""), made.get("digest", ""), names, looked_us)


class InForce(NamedTuple):
    """The names of the newest release's schedule entries.

    *is_ours* is True if this worker has the newest release. *removed* has the names of the
    schedule entries that only the previously stored release had. *is_tie* is True if this worker
    has other entries of the same version.
    """

    names: tuple[str, ...]
    is_ours: bool
    removed: tuple[str, ...] = ()
    is_tie: bool = False


def taken_over(snapshot: Snapshot, *, ours: Release, is_new: bool) -> Change[InForce]:
    """Choose the app's newer release: *ours* (this worker's release) or the stored release.

    A release is the app's version and its schedule entries. The release with the higher version
    is newer. If both have the same version but different schedule entries, *ours* is chosen if
    *is_new* is True, else the stored release. *is_new* is True if the worker has just started, or
    if the worker's schedule entries have changed.
    """
    stored = Release.from_text(snapshot.text)
    is_same = ours.version == stored.version and (is_new or ours.digest == stored.digest)
    in_force, answer = stored, InForce(stored.names, False, is_tie=ours.version == stored.version)
    if not stored.digest or is_same or ours.version > stored.version:
        removed = tuple(sorted({*stored.names}.difference(ours.names)))
        in_force, answer = ours, InForce(ours.names, True, removed)
    now_us = snapshot.now_us
    if in_force == stored and now_us - stored.looked_us < LOOKED_EVERY_US:
        return Change(snapshot.text, 0, answer)
    text = json.dumps(asdict(replace(in_force, looked_us=now_us)))
    return Change(text, now_us + KEPT_US, answer)


@dataclass(frozen=True)
class Rival:
    """Workers of the same app and version, but with other schedule entries, which do not run.

    *since_us* is the time when such a worker was first seen. *names* are the names of its entries.
    """

    since_us: int
    names: tuple[str, ...]

    @classmethod
    def from_text(cls, text: str | None) -> Rival | None:
        made = None if text is None else json.loads(text)
        return made and cls(made["since_us"], tuple(made["names"]))

    def lasts(self, now_us: int) -> bool:
        """Return True if this is no deployment, in which old workers end after some minutes."""
        return now_us - self.since_us >= RIVAL_US


def rivalled(snapshot: Snapshot, *, names: tuple[str, ...]) -> Change[bool]:
    """Return the :class:`Change` that stores that a worker with the entries *names* has no say.

    ``Change.answer`` is True if that is no deployment any more.
    """
    before = Rival.from_text(snapshot.text)
    rival = Rival(snapshot.now_us if before is None else before.since_us, names)
    kept_us = snapshot.now_us + _RIVAL_KEPT_US
    return Change(json.dumps(asdict(rival)), kept_us, rival.lasts(snapshot.now_us))

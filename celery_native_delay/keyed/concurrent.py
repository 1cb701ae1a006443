"""Decides how many tasks of one key run at a time: pure functions of the key's stored state.

All times are in microseconds since the epoch, by the clock of the Redis or database.
"""

from __future__ import annotations

from dataclasses import replace

from .record import Record, Run
from .rules import LEASE_US, Seen, Step

#: The stored state is kept for an hour after the last lease or the last wait.
_KEPT_US = 3_600_000_000

#: Duration of a task until one has ended, and the bounds of the time between two tasks that ask
#: again: a key with long tasks is asked seldom, and a slot is not free for long.
_USUAL_US = 50_000
_SHORTEST_US = 5_000
_LONGEST_US = 5_000_000


def begin(seen: Seen, task_id: str, *, token: str, most: int) -> Step:
    """Let a task run if fewer than *most* tasks of its key run, or return the time to ask again."""
    now_us, known = seen.now_us, seen.record or Record()
    runs = tuple(run for run in known.runs if now_us < run.lease_us)
    if len(runs) < most:
        run = Run(task_id, token, now_us + LEASE_US, now_us)
        return _kept(replace(known, runs=(*runs, run)), now_us)
    youngest_us = now_us - max(run.since_us for run in runs)
    took_us = max(known.took_us or _USUAL_US, youngest_us)
    # Two tasks ask in the time in which one ends.
    apart_us = min(max(took_us // (2 * most), _SHORTEST_US), _LONGEST_US)
    asks_us = max(known.asks_us, now_us) + apart_us
    return replace(_kept(replace(known, runs=runs, asks_us=asks_us), now_us), free_us=asks_us)


def renew(seen: Seen, *, token: str) -> Step:
    """Prolong the lease of the attempt *token*."""
    known = seen.record
    if known is None or token not in known.tokens:
        return Step(known)
    until_us = seen.now_us + LEASE_US
    runs = (replace(run, lease_us=until_us) if run.token == token else run for run in known.runs)
    return _kept(replace(known, runs=tuple(runs)), seen.now_us)


def end(seen: Seen, *, token: str, has_run: bool = True) -> Step:
    """End the attempt *token*. If *has_run* is True, remember how long the task took."""
    known = seen.record
    if known is None or token not in known.tokens:
        return Step(known)
    (run,) = (run for run in known.runs if run.token == token)
    runs, took_us = tuple(other for other in known.runs if other is not run), known.took_us
    if has_run:
        latest_us = seen.now_us - run.since_us
        took_us = latest_us if took_us == 0 else (3 * took_us + latest_us) // 4
    return _kept(replace(known, runs=runs, took_us=took_us), seen.now_us)


def _kept(record: Record, now_us: int) -> Step:
    return Step(record, max(now_us + LEASE_US, record.asks_us) + _KEPT_US)

"""The changes that would help a load, each worked out before it is said."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

from ..errors import SettingsError
from ..settings import DelaySettings
from ..transports.rabbitmq.topology import Topology
from .levels import mean_hops, passages
from .load import ANY_US, Load
from .service import Service

#: Fuller than this, queues and processors make tasks late.
FULL = 0.7

#: A change must help by so much to be worth saying.
_HELPS = 0.9

_FUSED = (0, 3, 7, 11, 15, 19, 23, 27, 31)
_RESOLUTIONS = (0.025, 0.05, 0.125, 0.25, 0.5, 1.0)

#: Seconds over which tasks with one delay may be spread.
_SPREADS = (1, 2, 5, 10, 20, 30, 60, 120)


@dataclass(frozen=True)
class Advice:
    """A change, and what it does."""

    change: str
    effect: str

    def __str__(self) -> str:
        return f"{self.change}: {self.effect}"

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class _Fullness:
    """The fullest queue and the processors with some settings, 1 being all that they can."""

    hops: float
    queue: float
    processors: float
    queues: int

    @classmethod
    def of(cls, settings: DelaySettings, load: Load, service: Service) -> _Fullness:
        topology = Topology(settings)
        found = passages(topology, load, service)
        hops = mean_hops(topology, load.spreads)
        return cls(
            hops,
            max((one.utilisation for one in found), default=0.0),
            load.busiest_per_second / service.limit_per_second(hops),
            len(topology.level_queues),
        )

    def __str__(self) -> str:
        return (
            f"{self.hops:.2f} hops each, the fullest queue at {self.queue * 100:.0f} %, the "
            f"processors at {self.processors * 100:.0f} %"
        )


def advise(
    settings: DelaySettings,
    load: Load,
    service: Service,
    limit_per_second: float,
    *,
    late_p99_ms: float,
) -> Iterator[Advice]:
    """Changes for a load; nothing where nothing is full and nothing late by its resolution.

    *limit_per_second* are the tasks that the processors carry, turns being as full as they are.
    """
    cores = service.cores
    hops = mean_hops(Topology(settings), load.spreads)
    service = replace(service, cores=cores * limit_per_second / service.limit_per_second(hops))
    now = _Fullness.of(settings, load, service)
    if load.fixed_dues and max(now.queue, now.processors) >= FULL:
        seconds = math.ceil(load.densest.weight * max(now.queue, now.processors) / FULL)
        seconds = math.ceil(seconds / load.busiest_per_second)
        yield Advice(
            f"smear={seconds} in the fan-out, or due times that are further apart",
            f"the {load.densest.weight:,.0f} tasks that are due together come through in time",
        )
    if now.queue >= FULL:
        yield from _to_spread(settings, load, service, now)
        yield from _more_places(load, service, now)
    if max(now.queue, now.processors) >= FULL:
        yield from _other_levels(settings, load, service, now)
    if now.processors >= FULL:
        wanted = math.ceil(cores * now.processors / FULL)
        yield Advice(
            f"{wanted} processors for the broker instead of {cores:g}",
            f"they are at {now.processors * cores / wanted * 100:.0f} %",
        )
    elif late_p99_ms > 40 and now.queue < FULL:
        yield from _finer(settings, load, service)


def _to_spread(
    settings: DelaySettings, load: Load, service: Service, now: _Fullness
) -> Iterator[Advice]:
    """Tasks with one and the same delay all meet in its queues."""
    if load.fixed_dues or any(one.count > 1 for one in load.spreads):
        return
    for seconds in _SPREADS:
        count = seconds * 1_000_000 + 1
        wider = tuple(replace(one, step_us=ANY_US, count=count) for one in load.spreads)
        then = _Fullness.of(settings, replace(load, spreads=wider), service)
        if then.queue < FULL and then.queue < now.queue * _HELPS:
            yield Advice(f"spread the delays: countdown=… + {seconds} * random()", str(then))
            return


def _more_places(load: Load, service: Service, now: _Fullness) -> Iterator[Advice]:
    wanted = service.ceiling_per_second * now.queue / FULL
    for prefetch in (64, 128, 256, 512, 1024):
        if prefetch <= service.prefetch:
            continue
        ceiling = replace(service, prefetch=prefetch).ceiling_per_second
        if ceiling >= wanted:
            full = now.queue * service.ceiling_per_second / ceiling
            yield Advice(
                f"RabbitMQ's dead_letter_worker_consumer_prefetch of {prefetch}, where you may",
                f"a queue passes {ceiling:,.0f} messages a second, the fullest at "
                f"{full * 100:.0f} %",
            )
            return


def _other_levels(
    settings: DelaySettings, load: Load, service: Service, now: _Fullness
) -> Iterator[Advice]:
    """The best other value of each setting that shapes the levels."""
    for candidates in (
        [_changed(settings, fused_bits=bits) for bits in _FUSED],
        [_with_resolution(settings, seconds) for seconds in _RESOLUTIONS],
    ):
        found = [
            (_Fullness.of(one, load, service), one)
            for one in candidates
            if one is not None and one.longest_delay_seconds >= load.longest_seconds
        ]
        if not found:
            continue
        then, best = min(found, key=lambda one: (round(_worse(one[0]), 3), one[0].queues))
        if _worse(then) < _worse(now) * _HELPS:
            yield Advice(_said(settings, best), f"{then}, with {then.queues} level queues")


def _said(before: DelaySettings, after: DelaySettings) -> str:
    """The settings that differ, as one writes them."""
    names = ("fused_bits", "resolution", "levels")
    changed = [name for name in names if getattr(after, name) != getattr(before, name)]
    return ", ".join(f"native_delay_{name} = {getattr(after, name):g}" for name in changed)


def _worse(full: _Fullness) -> float:
    return max(full.queue, full.processors)


def _finer(settings: DelaySettings, load: Load, service: Service) -> Iterator[Advice]:
    """Delays that are no multiple of the resolution wait for those before them."""
    unit_us = settings.resolution_ms * 1000
    if all(
        one.first_us % unit_us == 0 and (one.count == 1 or one.step_us % unit_us == 0)
        for one in load.spreads
    ):
        return
    seconds = max((one for one in _RESOLUTIONS if one < settings.resolution), default=0.001)
    finer = _with_resolution(settings, seconds)
    if finer is None:
        return
    then = _Fullness.of(finer, load, service)
    if _worse(then) < FULL:
        yield Advice(
            _said(settings, finer),
            f"delays that are no multiple of it are late by {seconds * 1000:g} ms more at most "
            f"instead of {settings.resolution_ms} ms; {then}",
        )


def _with_resolution(settings: DelaySettings, seconds: float) -> DelaySettings | None:
    """*settings* with another resolution and about as long a longest delay."""
    more = round(math.log2(settings.resolution / seconds))
    return _changed(settings, resolution=seconds, levels=settings.levels + more)


def _changed(settings: DelaySettings, **changes: Any) -> DelaySettings | None:
    try:
        return replace(settings, **changes)
    except SettingsError:
        return None

"""A simulation of level queues, event by event: what places, turns and processors make of a load.

Time is the simulation's own, in milliseconds, and chance is seeded.

A message is taken in, which costs the broker's processors something, and is then in its first level
queue. There it stays until its own time, and that of all before it, is over. The queue then takes
its turn on a processor, with as many of its expired messages as it has places; when they are
committed they are in the queues after it, and when that is acknowledged the queue may take its next
turn. The destination queue hands out what comes, in the order in which it comes. So a message is
late by all that it waited for on the way: a turn, a processor, a commit. And now and then
everything stands still.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush
from itertools import islice
from math import ceil, inf
from typing import Any

from ..transports.rabbitmq.topology import Topology
from .load import InvalidLoad, Load
from .sends import MOST_TASKS, Send, fan_out_sends, steady_sends
from .service import Service

#: A steady load is simulated for so many seconds, if these are enough and not too many tasks.
SECONDS, FEWEST_TASKS = 20, 4_000

#: And for so many ticks.
_TICKS = 8

#: Messages that are taken in, and handed out, in one go.
_TOGETHER = 16

_LATE_GROWS_MS = 100


@dataclass(frozen=True)
class Outcome:
    """The end of a simulation: how late each task was, and what it cost the broker."""

    late_ms: list[float]
    """Of all tasks, the lowest first."""
    cpu_ms_per_task: float
    turns_per_task: float
    """Turns of level queues, of which several tasks may share one."""
    growing: bool
    """True if tasks were much later after a while than at first: the broker does not keep up."""

    def percentile_ms(self, percent: float) -> float:
        """The lateness below which *percent* of the tasks stayed."""
        return self.late_ms[min(int(len(self.late_ms) * percent / 100), len(self.late_ms) - 1)]

    def as_json(self) -> dict[str, Any]:
        return {
            "p50_ms": self.percentile_ms(50),
            "p95_ms": self.percentile_ms(95),
            "p99_ms": self.percentile_ms(99),
            "max_ms": self.late_ms[-1],
            "growing": self.growing,
            "tasks": len(self.late_ms),
        }


def simulate_load(topology: Topology, load: Load, service: Service, *, seed: int = 1) -> Outcome:
    """Simulate some of a load: as much of a steady one as tells, of a fan-out its worst second.

    Raises:
        InvalidLoad: more is sent at one tick than can be simulated.
    """
    chance = random.Random(seed)
    if load.fixed_dues:
        return simulate(topology, service, fan_out_sends(load, chance))
    together = load.per_second * load.tick_seconds
    if together * _TICKS > MOST_TASKS:
        raise InvalidLoad(
            f"expected ticks of {MOST_TASKS // _TICKS:,} tasks at most, got {together:,.0f}: tell "
            f'so many at once as a fan-out, a histogram with "due"'
        )
    count = round(min(max(load.per_second * SECONDS, FEWEST_TASKS, together * _TICKS), MOST_TASKS))
    sends = islice(steady_sends(load, chance), count)
    return simulate(topology, service, sends, tick_ms=load.tick_seconds * 1000, shortened=True)


def carried_per_second(
    topology: Topology, load: Load, service: Service, hops: float, *, seed: int = 1
) -> float:
    """Tasks a second that the processors carry, found by sending them as many as full turns would.

    Where many queues share the work, turns are not full even then.
    """
    most = replace(load, per_second=service.limit_per_second(hops), fixed_dues=False)
    sends = islice(steady_sends(most, random.Random(seed)), FEWEST_TASKS)
    outcome = simulate(topology, service, sends, shortened=True)
    return service.cores * 1000 / outcome.cpu_ms_per_task


def simulate(
    topology: Topology,
    service: Service,
    sends: Iterable[Send],
    *,
    tick_ms: float = 0.0,
    shortened: bool = False,
) -> Outcome:
    """Simulate *sends*, which are in order, until the last is handed out.

    Where the load is steady it does not matter how long messages lie in a queue, only how many
    come through: *shortened* waits of about one unit tell the same sooner. They stay in step with
    *tick_ms*.
    """
    return _Broker(topology, service, tick_ms, shortened).run(sends)


# ---- private ---------------------------------------------------------------------------------


@dataclass(eq=False, slots=True)
class _Queue:
    """A level queue, and what waits in it."""

    name: str
    ttl_ms: float
    waiting: deque[tuple[float, _Message]] = field(default_factory=deque)
    in_turn: bool = False
    last_ms: float = 0.0
    wakes_ms: float = inf


@dataclass(eq=False, slots=True)
class _Message:
    """A task on its way: the queues ahead, and what its first wait is shorter."""

    due_ms: float
    ahead: Iterator[_Queue]
    shorter_ms: float


#: A piece of work: begun once a processor is free, it yields its cost, and then does the rest.
_Job = Generator[float, None, None]


class _Broker:
    """The clock, the processors and the queues."""

    def __init__(
        self, topology: Topology, service: Service, tick_ms: float, shortened: bool
    ) -> None:
        self._topology = topology
        self._service = service
        self._tick_ms = tick_ms
        self._shortened = shortened
        self._paths: dict[int, tuple[list[_Queue], float]] = {}
        self._queues: dict[str, _Queue] = {}
        self._events: list[tuple[float, int, Callable[[Any], None], Any]] = []
        self._numbers = 0
        self._now = 0.0
        self._processors = self._idle = max(1, ceil(service.cores))
        self._slower = self._idle / service.cores
        self._ready: deque[_Job] = deque()
        self._cpu_ms = 0.0
        self._turns = 0
        self._sending: deque[_Message] = deque()
        self._taking_in = 0
        self._arrived: deque[_Message] = deque()
        self._handing_out = False
        self._late: list[tuple[float, float]] = []
        self._on_their_way = 0
        self._all_sent = False

    def run(self, sends: Iterable[Send]) -> Outcome:
        sends = iter(sends)
        self._send_next(sends)
        if self._service.pauses_per_minute and self._events:
            self._pause_later(self._events[0][0])
        while self._events:
            self._now, _, do, what = heappop(self._events)
            do(what)
        return self._outcome()

    def _outcome(self) -> Outcome:
        dues = sorted(self._late)
        quarter = max(len(dues) // 4, 1)
        before, after = (
            sorted(late for _, late in part)[len(part) // 2]
            for part in (dues[:quarter], dues[2 * quarter : 3 * quarter] or dues)
        )
        return Outcome(
            sorted(late for _, late in dues),
            cpu_ms_per_task=self._cpu_ms / len(dues),
            turns_per_task=self._turns / len(dues),
            growing=after > 1.5 * before + _LATE_GROWS_MS,
        )

    def _at(self, when_ms: float, do: Callable[[Any], None], what: Any) -> None:
        self._numbers += 1
        heappush(self._events, (when_ms, self._numbers, do, what))

    # --- processors ----------------------------------------------------------------------

    def _work(self, job: _Job) -> None:
        if self._idle:
            self._idle -= 1
            self._begin(job)
        else:
            self._ready.append(job)

    def _begin(self, job: _Job) -> None:
        cost_ms = next(job)
        self._cpu_ms += cost_ms
        self._at(self._now + cost_ms * self._slower, self._end, job)

    def _end(self, job: Iterator[float]) -> None:
        next(job, None)
        if self._ready:
            self._begin(self._ready.popleft())
        else:
            self._idle += 1

    def _pause_later(self, now_ms: float) -> None:
        self._at(now_ms + 60_000 / self._service.pauses_per_minute, self._pause, None)

    def _pause(self, _none: None) -> None:
        """Let every processor stand still, as soon as it has done what it is at."""
        if self._all_sent and not self._on_their_way:
            return
        for _ in range(self._processors):
            if self._idle:
                self._idle -= 1
                self._at(self._now + self._service.pause_ms, self._end, iter(()))
            else:
                self._ready.appendleft(self._stand_still())
        self._pause_later(self._now)

    def _stand_still(self) -> _Job:
        self._cpu_ms -= self._service.pause_ms / self._slower  # it is no work
        yield self._service.pause_ms / self._slower

    # --- taking in -----------------------------------------------------------------------

    def _send_next(self, sends: Iterator[Send]) -> None:
        """Let the next tasks that are sent at one moment come then."""
        if (send := next(sends, None)) is not None:
            self._at(send.at_ms, self._sent, (send, sends))

    def _sent(self, what: tuple[Send, Iterator[Send]]) -> None:
        send, sends = what
        batch = [self._message(send)]
        for send in sends:
            if send.at_ms > self._now:
                self._at(send.at_ms, self._sent, (send, sends))
                break
            batch.append(self._message(send))
        else:
            self._all_sent = True
        self._on_their_way += len(batch)
        self._sending.extend(batch)
        self._take_in_more()

    def _take_in_more(self) -> None:
        """As with one connection for each processor."""
        while self._sending and self._taking_in < self._processors:
            self._taking_in += 1
            self._work(self._take_in())

    def _take_in(self) -> _Job:
        batch = [self._sending.popleft() for _ in range(min(_TOGETHER, len(self._sending)))]
        yield len(batch) * self._service.message_ms / 2
        self._taking_in -= 1
        self._commit(batch)
        self._take_in_more()

    def _commit(self, batch: list[_Message]) -> None:
        self._at(self._now + self._service.commit_ms / 2, self._committed, batch)

    def _message(self, send: Send) -> _Message:
        unit_us = self._topology.resolution_ms * 1000
        units = -(-send.delay_us // unit_us) if send.delay_us > 0 else 0
        if units not in self._paths:
            queues = [self._queue(hop.queue, hop.ttl_ms) for hop in self._topology.path(units)]
            self._paths[units] = queues, sum(queue.ttl_ms for queue in queues)
        queues, waits_ms = self._paths[units]
        shorter_ms = (units * unit_us - max(send.delay_us, 0)) / 1000
        return _Message(send.at_ms + waits_ms - shorter_ms, iter(queues), shorter_ms)

    def _queue(self, name: str, ttl_ms: int) -> _Queue:
        if name not in self._queues:
            unit_ms = self._topology.resolution_ms
            more_ms = ttl_ms - unit_ms
            shown = unit_ms + (more_ms % self._tick_ms if self._tick_ms else 0)
            self._queues[name] = _Queue(name, shown if self._shortened else ttl_ms)
        return self._queues[name]

    # --- level queues --------------------------------------------------------------------

    def _committed(self, batch: list[_Message]) -> None:
        """Put a batch that was on its way into the queues that are next for each."""
        touched = set()
        for message in batch:
            queue = next(message.ahead, None)
            if queue is None:
                self._arrived.append(message)
                continue
            expires_ms = self._now + queue.ttl_ms - message.shorter_ms
            message.shorter_ms = 0.0
            # In whole milliseconds, and only from the head.
            queue.last_ms = max(queue.last_ms, ceil(expires_ms))
            queue.waiting.append((queue.last_ms, message))
            touched.add(queue)
        for queue in sorted(touched, key=lambda one: one.name):
            self._look(queue)
        self._hand_out()

    def _look(self, queue: _Queue) -> None:
        """Let *queue* take its turn if it can, or wake it when something expires."""
        if queue.in_turn or not queue.waiting:
            return
        expires_ms = queue.waiting[0][0]
        if expires_ms <= self._now:
            queue.in_turn = True
            self._work(self._turn(queue))
        elif not self._now < queue.wakes_ms <= expires_ms:
            queue.wakes_ms = expires_ms
            self._at(expires_ms, self._look, queue)

    def _turn(self, queue: _Queue) -> _Job:
        waiting, service = queue.waiting, self._service
        self._turns += 1
        batch: list[_Message] = []
        while waiting and len(batch) < service.prefetch and waiting[0][0] <= self._now:
            batch.append(waiting.popleft()[1])
        yield service.turn_ms + len(batch) * service.hop_ms
        self._commit(batch)
        self._at(self._now + service.commit_ms, self._settled, queue)

    def _settled(self, queue: _Queue) -> None:
        queue.in_turn = False
        self._look(queue)

    # --- the destination queue -----------------------------------------------------------

    def _hand_out(self) -> None:
        if self._arrived and not self._handing_out:
            self._handing_out = True
            self._work(self._hand_out_some())

    def _hand_out_some(self) -> _Job:
        each_ms = self._service.message_ms / 2
        batch = [self._arrived.popleft() for _ in range(min(_TOGETHER, len(self._arrived)))]
        for number, message in enumerate(batch, 1):
            at_ms = self._now + number * each_ms * self._slower
            self._late.append((message.due_ms, at_ms - message.due_ms))
        self._on_their_way -= len(batch)
        yield len(batch) * each_ms
        self._handing_out = False
        self._hand_out()

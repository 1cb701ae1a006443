"""Serve workers and the ``delay`` commands on RabbitMQ."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from time import sleep
from typing import Any

import amqp
from amqp.exceptions import AccessRefused, ChannelError, NotFound, ResourceLocked

from ...durations import duration
from ...errors import ManagementUnavailable, NativeDelayError, NotDeclared, NotPermitted
from ...finding import Finding
from ...message import Delayed
from ...settings import DelaySettings
from ..interface import AdminPart, Backlog, ParkedTask, Rescue, Told, Wait, WorkerPart
from .declaring import permissions_explained
from .delays import RabbitDelays
from .inspection import COUNTED_ANEW_SECONDS, examine, verify
from .management import ManagementAPI, management_of, overriding_policies, refusing_queues
from .mirror import diverted, note_queues
from .parking import count, peek, rescue, rescue_in_turn
from .status import levels, status


class RabbitMQWorkerPart(WorkerPart):
    def serve(self, queues: Sequence[str]) -> None:
        """Bind the queues by their names, also those that look like queues for replies."""
        for queue in queues:
            self._delays.mirror.queue_bound_once(queue)

    def prepare(self, where: str) -> str:
        prepared = self._delays.prepare(consuming=True)
        settings = self.settings
        return (
            f"{settings.levels} levels of {duration(settings.resolution)} on "
            f"{where}, {'declared' if prepared.declared else 'found declared'} in "
            f"{prepared.seconds * 1000:.0f} ms; {len(self._delays.mirror.known)} bindings; "
            f"{self.terms}"
        )

    def watch_queues(self) -> list[str]:
        delays, topology = self._delays, self._delays.topology
        api = management_of(delays.connection.client, self.settings)
        told = [str(finding) for finding in overriding_policies(api, topology)]
        for found in refusing_queues(api, topology) if self.settings.declare else ():
            landing = topology.queue_landing_queue(found.queue)
            try:
                for pattern in found.patterns:
                    delays.declarer.apply(diverted(topology, found.queue, pattern))
            except ChannelError as exc:
                told.append(f"{found}, and {landing} cannot be used: {exc}")
            else:
                told.append(f"{found}: from now on its due messages go through {landing}")
        return told

    @property
    def comes_back_late_seconds(self) -> float:  # type: ignore[override]
        return self.settings.resolution + WorkerPart.comes_back_late_seconds

    def put_back(self, waits: Sequence[Wait]) -> list[Exception | None]:
        delays: RabbitDelays = self._delays
        return delays.put_back([self._received(wait) for wait in waits])

    @staticmethod
    def _received(wait: Wait) -> tuple[amqp.Message, Delayed]:
        properties = dict(wait.message.properties)
        if wait.headers:
            headers = properties.get("application_headers") or {}
            properties["application_headers"] = {**headers, **wait.headers}
        message = amqp.Message(wait.message.raw_body, **properties)
        info, earlier = wait.message.delivery_info, wait.message.native_delay
        delayed = Delayed(
            wait.delivery_id or wait.new_id,
            wait.due_us,
            info["exchange"],
            info["routing_key"],
            wait.queue,
            expires_ms=None if earlier is None else earlier.expires_ms,
        )
        return message, delayed

    def rescue(self) -> Rescue | None:
        return self._permitted(rescue)

    def rescue_in_turn(self) -> Rescue | None:
        return self._permitted(rescue_in_turn)

    def _permitted(self, rescue: Callable[[RabbitDelays], Rescue | None]) -> Rescue | None:
        try:
            return rescue(self._delays)
        except AccessRefused as exc:
            topology = self._delays.topology
            raise NotPermitted(
                f"{exc.reply_text}; rescuing needs configure on {topology.parking_queue} and "
                f"{topology.rescue_lock_queue}, write and read on ^{self.settings.namespace}\\."
            ) from exc


class RabbitMQAdminPart(AdminPart):
    def __init__(self, channel: Any, settings: DelaySettings) -> None:
        self._channel = channel
        self._delays = channel.delays
        self._settings = settings
        self._topology = self._delays.topology
        self.name: str = self._topology.name
        self.parking: str = self._topology.parking_queue
        self._queues: Sequence[Any] = ()

    def serve(self, queues: Sequence[Any]) -> None:
        self._queues = queues

    def declare(self, queues: Sequence[Any]) -> Told:
        """Declare the app's queues and this package's delay queues.

        If native_delay_declare is off, this is what declares for workers and producers, and also
        binds queues that have kombu's ``no_declare``. Raises NotDeclared if one is missing.
        """
        if not self._settings.declare:
            connection, settings = self._channel.connection, replace(self._settings, declare=True)
            self._delays = connection.delays = RabbitDelays(connection, settings)
        with permissions_explained(self._topology):
            if not self._settings.declare:
                for queue in queues:
                    if queue.no_declare and self._delays.declarer.depth(queue.name) is None:
                        raise NotDeclared(
                            f"queue {queue.name!r} is missing, and has no_declare: declare it first"
                        )
                note_queues(self._delays.mirror, self._topology, queues)
            for queue in queues:
                queue(self._channel).declare()
            prepared = self._delays.prepare(redeclare=True, consuming=True)
        milliseconds = prepared.seconds * 1000
        sentence = f"{self.name} and {prepared.mirrored} binding(s) in {milliseconds:.0f} ms"
        return Told({"name": self.name} | asdict(prepared), [f"declared {sentence}"])

    def examine(self) -> Iterator[Finding]:
        api, missing = self._api(), False
        try:
            with permissions_explained(self._topology):
                for finding in verify(self._delays, api, self._queues):
                    missing |= finding.check == "permissions"
                    yield finding
                found = status(self._delays, api, self._queues)
                yield from found.findings()
                yield from examine(self._delays, api, found)
        except NotPermitted:
            if not missing:  # a finding has named the right
                raise

    def status(self) -> Told:
        with permissions_explained(self._topology):
            return status(self._delays, self._api(), self._queues).told()

    def backlog(self) -> Backlog:
        """Count waiting messages over AMQP, without the management API."""
        with permissions_explained(self._topology):
            found, parked = tuple(levels(self._delays)), count(self._delays)
        return Backlog(sum(level.waiting for level in found), parked, found)

    def purge(self) -> int:
        with permissions_explained(self._topology):
            return sum(self._purged(hop.queue) for hop in self._topology.level_queues)

    def uninstall(self) -> list[str]:
        topology, delays, api = self._topology, self._delays, self._api()
        space = f"{topology.space}."
        try:
            queues, exchanges = (
                [each for each in api.names(kind, containing=space) if each.startswith(space)]
                for kind in ("queues", "exchanges")
            )
            # RabbitMQ deletes the lock with its connection.
            queues = [name for name in queues if name != topology.rescue_lock_queue]
            with permissions_explained(topology):
                if any(map(delays.declarer.depth, queues)):
                    raise _still_waiting(space)
                # The exchanges that receive new messages are deleted first, then the empty queues.
                entrances = {topology.ready_exchange, *(hop.entry for hop in topology.level_queues)}
                self._delete_exchanges(entrances.intersection(exchanges))
                if queues:
                    sleep(COUNTED_ANEW_SECONDS)
                counted = {
                    queue["name"]: queue.get("messages", 0) + queue.get("messages_dlx", 0)
                    for queue in api.named("queues", space)
                }
                if any(delays.declarer.depth(name) or counted.get(name) for name in queues):
                    raise _still_waiting(space)
                for name in queues:
                    delays.declarer.channel.queue_delete(name)
                self._delete_exchanges(name for name in exchanges if name not in entrances)
        except ManagementUnavailable as exc:
            raise ManagementUnavailable(
                f"{exc}. Or delete the queues and exchanges {space}* by hand: no task waits in them"
            ) from exc
        return [f"{len(queues)} queue(s) and {len(exchanges)} exchange(s) {space}*"]

    def _delete_exchanges(self, names: Iterable[str]) -> None:
        for name in names:
            with suppress(NotFound):
                self._delays.declarer.channel.exchange_delete(name)

    def parked(self, *, limit: int) -> tuple[int, list[ParkedTask]] | None:
        with permissions_explained(self._topology):
            total = count(self._delays)
            try:
                found = peek(self._delays, limit=limit)
            except ResourceLocked:
                return None
        return total, [ParkedTask.of(item.message.headers or {}, item.delayed) for item in found]

    def requeue(self) -> Rescue | None:
        with permissions_explained(self._topology):
            return rescue(self._delays)

    def purge_parked(self) -> int:
        with permissions_explained(self._topology):
            return self._purged(self.parking)

    def _purged(self, queue: str) -> int:
        try:
            return int(self._delays.declarer.channel.queue_purge(queue))
        except NotFound:
            return 0

    def _api(self) -> ManagementAPI:
        return management_of(self._delays.connection.client, self._settings)


def _still_waiting(space: str) -> NativeDelayError:
    return NativeDelayError(
        f"messages wait in {space}*: wait until `celery -A PROJ delay status` shows none, or use "
        f"--move-to-eta"
    )

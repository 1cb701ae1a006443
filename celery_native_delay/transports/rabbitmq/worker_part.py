"""RabbitMQ operations that a worker needs for delayed messages."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import amqp
from amqp.exceptions import AccessRefused, ChannelError

from ...durations import duration
from ...errors import NotPermitted
from ...message import Delayed
from ..interface import Rescue, Wait, WorkerPart
from .delays import RabbitDelays
from .management import management_of, overriding_policies, refusing_queues
from .mirror import diverted
from .parking import rescue, rescue_in_turn


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

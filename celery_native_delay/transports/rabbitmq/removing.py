"""Delete the queues and exchanges of this package, for ``delay uninstall``."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from time import sleep

from amqp.exceptions import NotFound

from ...errors import NativeDelayError
from .declaring import permissions_explained
from .delays import RabbitDelays
from .inspection import COUNTED_ANEW_SECONDS
from .management import ManagementAPI
from .topology import Topology


def remove_all(delays: RabbitDelays, api: ManagementAPI) -> str:
    """Delete all queues and exchanges of the app's namespace; return a text that counts them.

    Raises NativeDelayError, without deleting a queue, if messages wait.
    """
    topology = delays.topology
    space = f"{topology.space}."
    queues, exchanges = (
        [each for each in api.names(kind, containing=space) if each.startswith(space)]
        for kind in ("queues", "exchanges")
    )
    # RabbitMQ deletes the lock with its connection.
    queues = [name for name in queues if name != topology.rescue_lock_queue]
    entrances = _entrances(topology)
    with permissions_explained(topology):
        if any(delays.declarer.depth(name) for name in queues):
            raise _still_waiting(topology)
        # The exchanges that receive new messages are deleted first, then the empty queues.
        _delete_exchanges(delays, entrances.intersection(exchanges))
        if queues:
            sleep(COUNTED_ANEW_SECONDS)
        if _is_any_left(queues, delays, api):
            raise _still_waiting(topology)
        for name in queues:
            delays.declarer.channel.queue_delete(name)
        _delete_exchanges(delays, [name for name in exchanges if name not in entrances])
    return f"{len(queues)} queue(s) and {len(exchanges)} exchange(s) {space}*"


def _entrances(topology: Topology) -> set[str]:
    """Return the exchanges to which producers publish."""
    return {topology.ready_exchange, *(hop.entry for hop in topology.level_queues)}


def _is_any_left(queues: Sequence[str], delays: RabbitDelays, api: ManagementAPI) -> bool:
    counted = {
        queue["name"]: queue.get("messages", 0) + queue.get("messages_dlx", 0)
        for queue in api.named("queues", "")
    }
    return any(delays.declarer.depth(name) or counted.get(name) for name in queues)


def _delete_exchanges(delays: RabbitDelays, names: Iterable[str]) -> None:
    for name in names:
        with suppress(NotFound):
            delays.declarer.channel.exchange_delete(name)


def _still_waiting(topology: Topology) -> NativeDelayError:
    return NativeDelayError(
        f"messages wait in {topology.space}.*: wait until `celery -A PROJ delay status` shows "
        f"none, or use --move-to-eta"
    )

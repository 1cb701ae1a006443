"""Delete outdated queues and exchanges of this package and of Celery's delayed delivery."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from time import sleep

from amqp.exceptions import NotFound

from ...settings import DelaySettings
from ..moving import Reach, Remnant
from .declaring import permissions_explained
from .delays import Delays
from .elsewhere import CelerysLevels, celerys_levels, foreign_bindings, sets_of
from .inspection import COUNTED_ANEW_SECONDS
from .management import ManagementAPI
from .topology import Topology


@dataclass(frozen=True)
class _Place:
    """A set of outdated queues, exchanges and bindings to delete together."""

    name: str
    queues: tuple[str, ...]
    #: The exchanges to which producers publish.
    entrances: tuple[str, ...]
    exchanges: tuple[str, ...]
    bindings: tuple[tuple[str, str, str], ...] = ()


class Pruning:
    """Finds and deletes outdated delay queues and exchanges."""

    def __init__(self, delays: Delays, api: ManagementAPI, settings: DelaySettings) -> None:
        self._delays = delays
        self._api = api
        self._settings = settings
        self._places: dict[str, _Place] = {}

    def remnants(self, namespaces: Sequence[str], reaches: Sequence[Reach]) -> list[Remnant]:
        """Find outdated delay queues of Celery, and of this package in the former *namespaces*."""
        self._places = {
            place.name: place for place in [*self._sets(namespaces), *self._celerys(reaches)]
        }
        return list(map(self._remnant, self._places.values()))

    def _remnant(self, place: _Place) -> Remnant:
        return Remnant(
            place.name,
            sum(map(self._depth, place.queues)),
            len(place.queues),
            len(place.exchanges) + len(place.entrances),
            tuple(f"{queue} from {source}: {key}" for source, queue, key in place.bindings),
        )

    def prune(self, chosen: Sequence[Remnant]) -> list[Remnant]:
        """Delete the outdated delay queues and exchanges in *chosen*.

        A remnant is a set of outdated queues and exchanges that :meth:`remnants` found. A remnant
        with waiting messages is not deleted. If messages have arrived since the call of
        :meth:`remnants`, this method keeps the remnant's queues, and returns the remnant.
        """
        places = [self._places[remnant.name] for remnant in chosen if not remnant.waiting]
        with permissions_explained(self._delays.topology):
            # The exchanges that receive new messages are deleted first, then the empty queues.
            # A producer that still has the former settings declares the queues again.
            for place in places:
                self._delete_exchanges(place.entrances)
            if any(place.queues for place in places):
                sleep(COUNTED_ANEW_SECONDS)
            holds = self._holds(places)
            for place in places:
                if not holds[place.name]:
                    self._delete(place)
        return [
            Remnant(place.name, holds[place.name], len(place.queues), len(place.exchanges), ())
            for place in places
            if holds[place.name]
        ]

    def everything(self) -> Remnant:
        """Find all queues and exchanges of this app's namespace, as one remnant."""
        space = f"{self._delays.topology.space}."
        lock = self._delays.topology.rescue_lock_queue  # RabbitMQ deletes it with its connection
        queues, exchanges = (
            [each for each in self._api.names(kind, containing=space) if each.startswith(space)]
            for kind in ("queues", "exchanges")
        )
        topologies = [Topology(each) for each in sets_of([*queues, *exchanges], self._settings)]
        entrances = {name for each in topologies for name in _entrances(each)}
        place = _Place(
            space.removesuffix("."),
            tuple(name for name in queues if name != lock),
            tuple(name for name in exchanges if name in entrances),
            tuple(name for name in exchanges if name not in entrances),
        )
        self._places = {place.name: place}
        return self._remnant(place)

    # --- finding -------------------------------------------------------------------------

    def _sets(self, namespaces: Sequence[str]) -> Iterator[_Place]:
        for namespace in (self._settings.namespace, *namespaces):
            queues = self._api.names("queues", containing=f"{namespace}.")
            exchanges = self._api.names("exchanges", containing=f"{namespace}.")
            for settings in sets_of([*queues, *exchanges], self._settings):
                topology = Topology(settings)
                if settings.namespace == namespace and topology.name != self._delays.topology.name:
                    yield _place_of_set(topology, queues, exchanges)

    def _celerys(self, reaches: Sequence[Reach]) -> Iterator[_Place]:
        names = self._api.names("queues", containing="celery_delayed_")
        exchanges = self._api.names("exchanges", containing="celery_delayed_")
        found = celerys_levels([*names, *exchanges])
        foreign = set(self._foreign(found, exchanges, reaches))
        for levels in found or ([CelerysLevels()] if foreign else []):
            own = {*levels.queues, levels.delivery_exchange}
            entrance = levels.queues[0]
            yield _Place(
                levels.name,
                tuple(name for name in levels.queues if name in names),
                tuple({entrance} & set(exchanges)),
                tuple(sorted((own & set(exchanges)) - {entrance})),
                tuple(sorted(foreign)),
            )
            foreign = set()  # bindings do not tell their prefix

    def _foreign(
        self, found: Sequence[CelerysLevels], exchanges: Sequence[str], reaches: Sequence[Reach]
    ) -> Iterator[tuple[str, str, str]]:
        behind = {each.exchange for each in reaches if each.exchange and each.kind == "topic"}
        for levels in found:
            if levels.delivery_exchange in exchanges:
                bound = self._api.bindings_from(levels.delivery_exchange)
                behind |= {b["destination"] for b in bound if b["destination_type"] == "exchange"}
        there = behind.intersection(self._api.names("exchanges", containing=""))
        bound = [each for exchange in sorted(there) for each in self._api.bindings_from(exchange)]
        queues = [
            (each["source"], each["destination"], each["routing_key"])
            for each in bound
            if each["destination_type"] == "queue"
        ]
        yield from foreign_bindings(queues, reaches)

    def _holds(self, places: Iterable[_Place]) -> dict[str, int]:
        counted = {
            queue["name"]: queue.get("messages", 0) + queue.get("messages_dlx", 0)
            for queue in self._api.named("queues", "")
        }
        return {
            place.name: sum(max(self._depth(name), counted.get(name, 0)) for name in place.queues)
            for place in places
        }

    def _depth(self, queue: str) -> int:
        return self._delays.declarer.depth(queue) or 0

    # --- deleting ------------------------------------------------------------------------

    def _delete(self, place: _Place) -> None:
        for source, queue, key in place.bindings:
            with suppress(NotFound):
                self._delays.declarer.channel.queue_unbind(queue, source, key)
        for name in place.queues:
            self._delays.declarer.channel.queue_delete(name)
        self._delete_exchanges(place.exchanges)

    def _delete_exchanges(self, names: Iterable[str]) -> None:
        for name in names:
            with suppress(NotFound):
                self._delays.declarer.channel.exchange_delete(name)


def _entrances(topology: Topology) -> set[str]:
    return {topology.ready_exchange, *(hop.entry for hop in topology.level_queues)}


def _place_of_set(topology: Topology, queues: list[str], exchanges: list[str]) -> _Place:
    prefix = f"{topology.name}."
    own = [name for name in exchanges if name.startswith(prefix)]
    entrances = _entrances(topology)
    return _Place(
        topology.name,
        tuple(name for name in queues if name.startswith(prefix)),
        tuple(name for name in own if name in entrances),
        tuple(name for name in own if name not in entrances),
    )

"""kombu connections to any broker, and a worker's background jobs without its consumer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from threading import Barrier, Event
from typing import Any, TypeVar

from celery import Celery
from kombu import Connection, Queue

from celery_native_delay import DelaySettings, StoreUnavailable, install
from celery_native_delay.transports.interface import AdminPart, WorkerPart
from tests.conformance.brokers import needs_store, options_of, settings_of
from tests.traffic import JOBS, beside

#: On RabbitMQ few and short levels, which are quick to declare; the longest delay is 163.84 s.
SETTINGS = {"namespace": "tests", "levels": 13, "fused_bits": 0, "resolution": 0.02}

_LOOK_SECONDS = 0.2

T = TypeVar("T")


def plain(url: str, **transport_options: Any) -> Any:
    """A kombu connection."""
    return Connection(url, transport_options=options_of(url) | transport_options)


def delaying(url: str, *, transport_options: dict[str, Any] | None = None, **settings: Any) -> Any:
    """A kombu connection whose messages with an ETA ahead wait in the broker or in a store."""
    option = {"native_delay": SETTINGS | settings_of(url) | settings}
    return plain(url, **(option | (transport_options or {})))


@contextmanager
def attended(url: str, **own: Any) -> Iterator[None]:
    """Run a worker's background jobs until the block ends: prepare, promote, rescue."""
    settings = DelaySettings.from_mapping(SETTINGS | settings_of(url) | own)
    with ExitStack() as stack:
        connection = stack.enter_context(delaying(url, **own))
        part: WorkerPart = connection.default_channel.worker_part(settings)
        part.prepare(url)
        promoter = part.promoter(lambda **options: delaying(url, **own, **options))
        if promoter is not None:
            stack.enter_context(beside(promoter.run, stop=promoter.stop))
        ended = Event()

        def rescue() -> None:
            while not ended.wait(_LOOK_SECONDS):
                with suppress(StoreUnavailable):  # on a busy machine; a worker tries again, too
                    part.rescue()

        stack.enter_context(beside(rescue, stop=ended.set))
        yield


@contextmanager
def installed_app(
    url: str, folder: Path, new_store: Callable[[str], str], **more: Any
) -> Iterator[Celery]:
    """An installed app with results in *folder*, and with a store if its broker needs one.

    A worker's background jobs run until the block ends.
    """
    settings: dict[str, Any] = settings_of(url)
    if needs_store(url):
        settings["store"] = new_store(url)
    app = Celery("shop", broker=url, backend=f"file://{folder}", set_as_current=False)
    app.conf.update(broker_transport_options=options_of(url), task_default_queue=JOBS)
    with attended(url, **settings), app:
        yield install(app, **SETTINGS | more, **settings)


def waiting_count(connection: Any) -> int:
    """The number of waiting messages; deletes them."""
    part = connection.default_channel.admin_part(DelaySettings.from_mapping(SETTINGS))
    if connection.transport.driver_type in ("sqs", "pgmq"):  # and throws away part of it only
        return waiting_now(connection, "jobs", "other")
    return int(part.purge())


def waiting_now(connection: Any, *queues: str) -> int:
    """The number of waiting messages; brokers that count by queue count those of *queues*."""
    part: AdminPart = connection.default_channel.admin_part(DelaySettings.from_mapping(SETTINGS))
    part.serve([Queue(name) for name in queues])
    return part.backlog().waiting


def at_once(call: Callable[[int], T], callers: int = 4) -> list[T]:
    """The results of *callers* concurrent calls, each given its number."""
    barrier = Barrier(callers)

    def calling(number: int) -> T:
        barrier.wait()
        return call(number)

    with ThreadPoolExecutor(callers) as pool:
        return list(pool.map(calling, range(callers)))

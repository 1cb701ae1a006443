"""One private broker per kind, version and process; one virtual host or empty Redis per test."""

from __future__ import annotations

import os
import tempfile
import warnings
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from celery import _state, signals
from hypothesis import HealthCheck, settings

from celery_native_delay.testing import (
    PrivateRabbitMQ,
    PrivateRedis,
    private_rabbitmq,
    private_redis,
    require_redis,
    vhost_name,
)
from celery_native_delay.testing.redis import ServerName
from pytest_celery_native_delay import installed
from tests import sockets
from tests.brokers import MORTAL, in_ci, installed_rabbitmq
from tests.scheduling import broker_of, rank_of, scope_of
from tests.waiting import SLOWNESS

sockets.watch_sockets()

# How long an example takes is the machine's business.
settings.register_profile("tests", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("tests")


# A failed assertion tells its values there as well, not in test modules alone.
pytest.register_assert_rewrite(
    "tests.acceptance", "tests.conformance", "tests.integration", "tests.processes", "tests.traffic"
)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Let tests/scheduling.py say which tests pytest-xdist keeps in one process, and in which.

    Not `--dist=loadgroup`, which pytest 9.2 made useless:
    https://github.com/pytest-dev/pytest-xdist/issues/1386
    """
    from xdist.scheduler import LoadScopeScheduling

    class ByScope(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return scope_of(nodeid)

        def _assign_work_unit(self, node: Any) -> None:
            """Rather the first unit for a broker that runs in this process than the very first."""
            running = {broker_of(scope) for scope in self.assigned_work.get(node, ())}
            fits = (scope for scope in self.workqueue if broker_of(scope) in running - {None})
            if scope := next(fits, None):
                self.workqueue.move_to_end(scope, last=False)
            super()._assign_work_unit(node)

    config.option.loadscopereorder = False
    return ByScope(config, log)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """A failed test shows what its broker held at that moment: workers run, nothing is deleted."""
    from tests import telling

    report = yield
    if report.failed and call.when == "call":
        for name, value in getattr(item, "funcargs", {}).items():
            if tells := telling.of(value):
                report.sections.append((f"what {name} held when it failed", tells))
    return report


@signals.setup_logging.connect(weak=False)
def leave_logging_to_pytest(**_: Any) -> None:
    """A worker in this process configures no logging: its log level would outlive its test."""


@pytest.fixture(autouse=True)
def unshare_celery() -> Iterator[None]:
    """Neither a test's shared tasks nor a worker that did not start in this process outlive it.

    While ``start_worker`` starts a worker, ``result.get()`` is forbidden in the whole process.
    """
    shared = set(_state._on_app_finalizers)
    yield
    _state._on_app_finalizers.intersection_update(shared)
    _state._set_task_join_will_block(False)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item: pytest.Item) -> Generator[None]:
    """See pytest_runtest_teardown."""
    sockets.forget_sockets()
    yield


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Generator[None]:
    """A test that leaves a socket open fails itself, unless it ignores ResourceWarning."""
    yield
    getattr(item, "funcargs", {}).clear()  # what fixtures returned, pytest keeps until later
    if left := sockets.collect_sockets():
        said = "left open, and only the garbage collector closed it; opened by\n"
        warnings.warn(ResourceWarning(said + "\n".join(left)), stacklevel=1)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """What takes longest starts first, where there are several processes."""
    if SLOWNESS != 1:
        for item in items:
            marker = item.get_closest_marker("timeout")
            seconds = float(marker.args[0] if marker else config.getini("timeout"))
            item.add_marker(pytest.mark.timeout(seconds * SLOWNESS), append=False)
    if "PYTEST_XDIST_WORKER" in os.environ:
        items.sort(key=lambda item: rank_of(item.nodeid))


@pytest.fixture(
    scope="session",
    params=[
        pytest.param("3.10", marks=pytest.mark.rabbitmq310),
        pytest.param("4.3", marks=pytest.mark.rabbitmq43),
    ],
)
def rabbitmq_version(request: pytest.FixtureRequest) -> str:
    """A version that private_rabbitmq() can start; for tests that need a broker of their own."""
    return installed_rabbitmq(request.param)


@pytest.fixture(scope="session")
def running_rabbitmq() -> Iterator[Callable[..., PrivateRabbitMQ]]:
    """Starts a broker when it is first asked for; starting one takes seconds."""
    with ExitStack() as stack:

        @cache
        def running(version: str, **options: str) -> PrivateRabbitMQ:
            return stack.enter_context(private_rabbitmq(version=version, **options))

        yield running


@pytest.fixture(scope="session")
def rabbitmq(
    rabbitmq_version: str, running_rabbitmq: Callable[..., PrivateRabbitMQ]
) -> PrivateRabbitMQ:
    """The broker that all tests of this version share; do not stop it."""
    return running_rabbitmq(rabbitmq_version)


@pytest.fixture(scope="session")
def mortal_rabbitmq(
    rabbitmq_version: str, running_rabbitmq: Callable[..., PrivateRabbitMQ]
) -> PrivateRabbitMQ:
    """The broker of this version for tests that kill it or fill it; see tests.brokers.MORTAL."""
    return running_rabbitmq(rabbitmq_version, **MORTAL)


@pytest.fixture
def vhost_url(rabbitmq: PrivateRabbitMQ) -> Iterator[str]:
    """The url of an empty virtual host that belongs to this test."""
    url = rabbitmq.new_vhost()
    yield url
    rabbitmq.delete_vhost(vhost_name(url))


@pytest.fixture
def mortal_url(mortal_rabbitmq: PrivateRabbitMQ) -> Iterator[str]:
    """The url of an empty virtual host on a running broker that this test may kill."""
    mortal_rabbitmq.start()
    url = mortal_rabbitmq.new_vhost()
    yield url
    mortal_rabbitmq.start()
    mortal_rabbitmq.delete_vhost(vhost_name(url))


@pytest.fixture
def vhost(vhost_url: str) -> str:
    """The name of this test's virtual host, as the management API wants it."""
    return vhost_name(vhost_url)


@pytest.fixture(scope="session", params=["redis", in_ci("valkey")])
def server_name(request: pytest.FixtureRequest) -> ServerName:
    """A server that private_redis() can start: the system's Redis, the Valkey of the wheel."""
    return installed(require_redis, request.param).name


@pytest.fixture
def short_path() -> Iterator[Path]:
    """An empty folder whose path leaves room for a unix socket; pytest's own may be too long."""
    with tempfile.TemporaryDirectory(prefix="native-delay-") as folder:
        yield Path(folder)


@pytest.fixture(scope="session")
def shared_redis(server_name: ServerName) -> Iterator[PrivateRedis]:
    """The Redis or Valkey that all tests share; do not stop it."""
    with private_redis(server=server_name) as server:
        yield server


@pytest.fixture
def empty_redis(shared_redis: PrivateRedis) -> PrivateRedis:
    """The shared Redis or Valkey, emptied for this test."""
    shared_redis.client.flushall()
    return shared_redis


@pytest.fixture
def own_redis(server_name: ServerName) -> Iterator[PrivateRedis]:
    """A Redis or Valkey that this test may stop, fill or configure."""
    with private_redis(server=server_name) as server:
        yield server


@pytest.fixture(scope="session")
def records_server() -> Iterator[PrivateRedis]:
    """The Redis of all tests whose broker needs records; do not stop it."""
    installed(require_redis, "redis")
    with private_redis(server="redis") as server:
        yield server


@pytest.fixture
def records_redis(records_server: PrivateRedis) -> PrivateRedis:
    """The same, emptied for this test."""
    records_server.client.flushall()
    return records_server

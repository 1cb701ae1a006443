"""One private broker per kind, version and process; one virtual host or empty Redis per test."""

from __future__ import annotations

import signal
import tempfile
import warnings
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, suppress
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from amqp.exceptions import InternalError
from celery import _state, signals
from hypothesis import HealthCheck, settings
from kombu import Connection, Queue

from celery_native_delay.testing import (
    PrivateRabbitMQ,
    PrivateRedis,
    private_redis,
    require_redis,
    vhost_name,
)
from celery_native_delay.testing.redis import ServerName
from pytest_celery_native_delay import installed
from tests import sockets
from tests.brokers import MORTAL, ON_RABBITMQS, in_ci, installed_rabbitmq
from tests.given_rabbitmq import given_rabbitmq
from tests.rabbitmqs import private_rabbitmq
from tests.scheduling import broker_of, scope_of
from tests.waiting import SLOWNESS

sockets.watch_sockets()

# A script's `&` starts pytest with SIGINT ignored, and so would be the programs of the tests.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# How long an example takes is the machine's business.
settings.register_profile("tests", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("tests")


# Show the values of failed assertions in these helper modules too.
pytest.register_assert_rewrite(
    "tests.acceptance", "tests.conformance", "tests.integration", "tests.processes", "tests.traffic"
)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Let tests/scheduling.py group the tests for pytest-xdist, which starts large groups first.

    `--dist=loadgroup` does not work with pytest 9.2:
    https://github.com/pytest-dev/pytest-xdist/issues/1386
    """
    from xdist.scheduler import LoadScopeScheduling

    class ByScope(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return scope_of(nodeid)

        def _assign_work_unit(self, node: Any) -> None:
            """Assign the first group whose broker runs in this process, else the first group."""
            running = {broker_of(scope) for scope in self.assigned_work.get(node, ())}
            fits = (scope for scope in self.workqueue if broker_of(scope) in running - {None})
            if scope := next(fits, None):
                self.workqueue.move_to_end(scope, last=False)
            super()._assign_work_unit(node)

    return ByScope(config, log)


@signals.setup_logging.connect(weak=False)
def leave_logging_to_pytest(**_: Any) -> None:
    """Keep workers in this process from setting a log level, which would outlive the test."""


@pytest.fixture(autouse=True)
def unshare_celery() -> Iterator[None]:
    """Remove a test's shared tasks, and the state of a worker that did not start, after the test.

    While ``start_worker`` starts a worker, Celery forbids ``result.get()`` in the whole process.
    """
    shared = set(_state._on_app_finalizers)
    yield
    _state._on_app_finalizers.intersection_update(shared)
    _state._set_task_join_will_block(False)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item: pytest.Item) -> Generator[None]:
    """Note the open sockets; pytest_runtest_teardown checks for new ones."""
    sockets.forget_sockets()
    yield


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Generator[None]:
    """Fail a test that leaves a socket open, unless it ignores ResourceWarning."""
    yield
    getattr(item, "funcargs", {}).clear()  # pytest keeps the values of fixtures until later
    if left := sockets.collect_sockets():
        said = "left open, and only the garbage collector closed it; opened by\n"
        warnings.warn(ResourceWarning(said + "\n".join(left)), stacklevel=1)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """On a slow machine, give each test more time."""
    if SLOWNESS != 1:
        for item in items:
            marker = item.get_closest_marker("timeout")
            seconds = float(marker.args[0] if marker else config.getini("timeout"))
            item.add_marker(pytest.mark.timeout(seconds * SLOWNESS), append=False)


@pytest.fixture(scope="session", params=ON_RABBITMQS)
def rabbitmq_version(request: pytest.FixtureRequest) -> str:
    """A RabbitMQ version that private_rabbitmq() can start, for tests that start a broker."""
    return installed_rabbitmq(request.param)


@pytest.fixture(scope="session")
def running_rabbitmq() -> Iterator[Callable[..., PrivateRabbitMQ]]:
    """Returns the shared broker of a version; starts it at the first call."""
    with ExitStack() as stack:

        @cache
        def running(version: str, **options: str) -> PrivateRabbitMQ:
            if (given := given_rabbitmq()) is not None:
                return given
            return stack.enter_context(private_rabbitmq(version=version, **options))

        yield running


@pytest.fixture(scope="session")
def rabbitmq(
    rabbitmq_version: str, running_rabbitmq: Callable[..., PrivateRabbitMQ]
) -> PrivateRabbitMQ:
    """The RabbitMQ that all tests of this version share; do not stop it."""
    return running_rabbitmq(rabbitmq_version)


@pytest.fixture(scope="session")
def mortal_rabbitmq(
    rabbitmq_version: str, running_rabbitmq: Callable[..., PrivateRabbitMQ]
) -> PrivateRabbitMQ:
    """A RabbitMQ of this version for tests that kill it or fill it; see tests.brokers.MORTAL."""
    return running_rabbitmq(rabbitmq_version, **MORTAL)


@pytest.fixture
def vhost_url(rabbitmq: PrivateRabbitMQ) -> Iterator[str]:
    """The URL of an empty virtual host that only this test uses."""
    url = rabbitmq.new_vhost()
    yield url
    rabbitmq.delete_vhost(vhost_name(url))


_AT_LEAST_ONCE = {
    "x-queue-type": "quorum",
    "x-dead-letter-strategy": "at-least-once",
    "x-dead-letter-exchange": "amq.topic",
    "x-overflow": "reject-publish",
}


def dead_letters_at_least_once(url: str) -> bool:
    """False if RabbitMQ has given up its dead-letter workers, which only a restart brings back.

    RabbitMQ 3.10 does so after two of their crashes in five seconds, such as when virtual hosts are
    deleted under them: https://github.com/rabbitmq/rabbitmq-server/issues/16652
    """
    with suppress(InternalError), Connection(url) as connection:
        probe = Queue("probe", queue_arguments=_AT_LEAST_ONCE)(connection.default_channel)
        probe.declare()
        probe.delete()
        return True
    return False


@pytest.fixture
def mortal_url(mortal_rabbitmq: PrivateRabbitMQ) -> Iterator[str]:
    """The URL of an empty virtual host on a running RabbitMQ that this test may kill."""
    mortal_rabbitmq.start()
    url = mortal_rabbitmq.new_vhost()
    if not dead_letters_at_least_once(url):
        mortal_rabbitmq.kill()
        mortal_rabbitmq.start()
    yield url
    mortal_rabbitmq.start()
    mortal_rabbitmq.delete_vhost(vhost_name(url))


@pytest.fixture
def vhost(vhost_url: str) -> str:
    """The name of this test's virtual host, for the management API."""
    return vhost_name(vhost_url)


@pytest.fixture(scope="session", params=["redis", in_ci("valkey")])
def server_name(request: pytest.FixtureRequest) -> ServerName:
    """The kind of server for private_redis(): the system's Redis, or Valkey from a wheel."""
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
def store_server() -> Iterator[PrivateRedis]:
    """The Redis that all tests share for the records beside RabbitMQ; do not stop it."""
    installed(require_redis, "redis")
    with private_redis(server="redis") as server:
        yield server


@pytest.fixture
def store_redis(store_server: PrivateRedis) -> PrivateRedis:
    """The shared Redis for records, emptied for this test."""
    store_server.client.flushall()
    return store_server

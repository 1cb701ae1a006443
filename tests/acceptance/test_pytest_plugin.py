"""The pytest plugin as a user runs it: installed, in another project, in a separate process."""

from __future__ import annotations

import sys

import pytest

from celery_native_delay.testing import require_rabbitmq, require_redis
from pytest_celery_native_delay import installed
from tests.processes import output_of

pytest_plugins = ["pytester"]

STRICT = "-Werror", "--strict-markers", "--strict-config", "-pno:cacheprovider"


@pytest.fixture
def project(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    """A folder with a user's project, outside of this repository."""
    for name in ("CI", "PYTEST_ADDOPTS", "PYTEST_XDIST_WORKER"):
        monkeypatch.delenv(name, raising=False)
    return pytester


def test_the_plugin_imports_nothing_but_pytest() -> None:
    program = (
        "import sys, pytest\n"
        "before = set(sys.modules)\n"
        "import pytest_celery_native_delay\n"
        "print(*set(sys.modules) - before)\n"
    )
    assert output_of(sys.executable, "-c", program).split() == ["pytest_celery_native_delay"]


def test_the_private_redis_is_empty_for_every_test(project: pytest.Pytester) -> None:
    """And the fixtures are listed."""
    installed(require_redis)
    project.makepyfile(
        """
        import pytest

        @pytest.mark.parametrize("attempt", [1, 2])
        def test_it_is_empty(native_delay_redis, native_delay_redis_url, attempt):
            assert native_delay_redis_url == native_delay_redis.url
            assert native_delay_redis.client.dbsize() == 0
            native_delay_redis.client.set("left behind", attempt)
        """
    )
    project.runpytest_subprocess(*STRICT).assert_outcomes(passed=2)
    project.runpytest_subprocess("--fixtures").stdout.fnmatch_lines(
        [
            "*fixtures defined from pytest_celery_native_delay*",
            "native_delay_rabbitmq ?session scope? -- *",
            "native_delay_redis ?session scope? -- *",
        ]
    )


@pytest.mark.ci
def test_a_delayed_task_waits_in_the_private_rabbitmq(project: pytest.Pytester) -> None:
    """Tests share one node, each test has its own virtual host, and failing asserts show values.

    A server that a test kills runs again in the next, also without the URL fixture.
    """
    installed(require_redis)
    installed(require_rabbitmq)
    project.makepyfile(
        """
        import pytest
        from celery import Celery
        from celery_native_delay import install
        from kombu import Connection

        @pytest.fixture
        def app(native_delay_rabbitmq_url):
            return install(Celery("shop", broker=native_delay_rabbitmq_url, set_as_current=False))

        def test_it_waits(app):
            app.send_task("remind", countdown=60)
            with Connection(app.conf.broker_url) as connection:
                queue = connection.default_channel.queue_declare("celery", passive=True)
            assert queue.message_count == 0

        def test_it_is_alone(app):
            with app.connection_for_read() as connection:
                with pytest.raises(connection.channel_errors, match="404"):
                    connection.default_channel.queue_declare("celery", passive=True)

        def test_it_fails(native_delay_rabbitmq_url):
            assert native_delay_rabbitmq_url.partition(":")[0] == "redis"

        def test_killed(native_delay_rabbitmq, native_delay_redis, native_delay_redis_url):
            native_delay_rabbitmq.kill()
            native_delay_redis.kill()

        def test_killed_again(native_delay_rabbitmq, native_delay_rabbitmq_url):
            native_delay_rabbitmq.kill()

        def test_up(native_delay_rabbitmq_url, native_delay_redis_url):
            for url in native_delay_rabbitmq_url, native_delay_redis_url:
                with Connection(url) as connection:
                    connection.connect()
        """
    )
    result = project.runpytest_subprocess(*STRICT)
    result.assert_outcomes(passed=5, failed=1)
    result.stdout.fnmatch_lines(["*AssertionError: assert 'amqp' == 'redis'"])


@pytest.mark.parametrize(("ci", "outcome"), [("", {"skipped": 2}), ("true", {"errors": 2})])
def test_a_missing_broker_skips_a_test_and_fails_it_in_ci(
    project: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, ci: str, outcome: dict[str, int]
) -> None:
    monkeypatch.setenv("CI", ci)
    project.makeconftest(
        """
        import pytest
        from celery_native_delay.testing import rabbitmq, redis

        rabbitmq.find_rabbitmq = lambda version=None: None
        redis._installations = lambda: ()
        """
    )
    project.makepyfile(
        """
        def test_rabbitmq(native_delay_rabbitmq_url): ...
        def test_redis(native_delay_redis_url): ...
        """
    )
    result = project.runpytest_subprocess("-rsE", *STRICT)
    result.assert_outcomes(**outcome)
    assert "During handling" not in result.stdout.str()
    for name, remedy in ("RabbitMQ", "rabbitmq-server"), ("Redis", "embedded"):
        assert f"{name} " in result.stdout.str()
        assert remedy in result.stdout.str()

"""The test clock, which runs an app's delayed tasks in the process of a test."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from celery import Celery, chord, current_app
from celery.exceptions import NotRegistered
from celery.schedules import crontab
from kombu.transport import memory
from sqlalchemy import create_engine
from sqlalchemy.orm import Session

from celery_native_delay import (
    Delay,
    Rate,
    SettingsError,
    Unique,
    Verdict,
    in_transaction,
    install,
    now,
)
from celery_native_delay.app.installation import installed
from celery_native_delay.clock import Clock, StillWaiting
from celery_native_delay.clock import clock as clock_module
from celery_native_delay.worker import in_time

pytest_plugins = ["pytester"]

UNREACHABLE = "amqp://nowhere.invalid:1//"
DAY = 86400


@pytest.fixture
def ran() -> list[Any]:
    return []


@pytest.fixture
def app(ran: list[Any]) -> Celery:
    """An app whose broker and result backend do not exist, and whose tasks are eager."""
    app = install(Celery("shop", broker=UNREACHABLE, backend="redis://nowhere.invalid:1"))
    app.conf.task_always_eager = True

    @app.task(name="note")
    def note(what: Any) -> Any:
        ran.append(what)
        return what

    @app.task(name="tell_time")
    def tell_time() -> None:
        ran.append((datetime.now(UTC), time.time()))

    @app.task(name="fail")
    def fail(what: str) -> None:
        raise LookupError(what)

    @app.task(name="again", bind=True)
    def again(self: Any, seconds: float) -> None:
        ran.append(self.app.now())
        self.apply_async((seconds,), countdown=seconds)

    @app.task(name="at_once", bind=True)
    def at_once(self: Any) -> None:
        self.delay()

    @app.task(name="flaky", bind=True)
    def flaky(self: Any, tries: int) -> None:
        ran.append((self.app.now(), self.request.retries))
        if self.request.retries < tries:
            raise self.retry(countdown=60)

    return app


@pytest.fixture
def clock(app: Celery) -> Iterator[Clock]:
    with Clock(app) as clock:
        yield clock


@pytest.fixture
def without_time_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "time_machine", None)


def send(app: Celery, name: str, *args: Any, **options: Any) -> Any:
    return app.tasks[name].apply_async(args, **options)


def own_attributes(app: Celery) -> dict[str, dict[str, Any]]:
    """Attributes of the app's tasks, without those that Celery sets at the first publish."""
    return {
        name: {key: value for key, value in vars(task).items() if key != "_exec_options"}
        for name, task in app.tasks.items()
    }


def fail_under_a_clock(app: Celery) -> None:
    with Clock(app) as clock:
        assert not clock.due()
        send(app, "note", "lost", countdown=60, queue="side")
        send(app, "fail", "x")
        clock.advance()


# ---- what runs, and when -------------------------------------------------------------------------


def test_tasks_run_when_the_test_moves_the_clock(app: Celery, clock: Clock, ran: list[Any]) -> None:
    """Due tasks of every queue run in the order of their due times, later ones wait on."""
    send(app, "note", "third", countdown=3 * DAY, queue="mails")
    send(app, "note", "first", queue="urgent")
    send(app, "note", "second", eta=clock.now + timedelta(days=2))
    assert [task.args for task in clock.due()] == ["('second',)", "('third',)"]
    assert ran == []
    clock.advance()
    assert ran == ["first"]
    clock.advance(days=2, hours=23)
    assert ran == ["first", "second"]
    clock.advance_to(clock.now + timedelta(hours=1))
    assert ran == ["first", "second", "third"]
    assert not clock.due()


def test_the_clock_stands_at_the_due_time_of_the_task_that_runs(
    app: Celery, clock: Clock, ran: list[Any]
) -> None:
    start = clock.now
    for days in (30, 1):
        send(app, "tell_time", countdown=days * DAY)
    clock.advance(days=90)
    due = [start + timedelta(days=days) for days in (1, 30)]
    assert ran == [(moment, moment.timestamp()) for moment in due]
    assert datetime.now(UTC) == clock.now == start + timedelta(days=90)


@pytest.mark.usefixtures("without_time_machine")
def test_without_time_machine_only_due_times_move(app: Celery, ran: list[Any]) -> None:
    """A task that is retried on the way still runs at its place in the order of due times."""
    with Clock(app) as clock:
        start, real = clock.now, time.time()
        send(app, "flaky", 2, countdown=DAY)
        send(app, "note", "between", countdown=DAY + 90)
        send(app, "tell_time", countdown=2 * DAY)
        clock.advance(days=3)
        assert clock.now == start + timedelta(days=3)
    first, second, between, third, (_, seconds) = ran
    due = start + timedelta(days=1)
    assert between == "between"
    assert [first, second, third] == [(due + timedelta(minutes=n), n) for n in range(3)]
    assert seconds - real < DAY


def test_a_slow_machine_changes_no_start_on_the_clock(
    app: Celery, ran: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker would let the task wait for five seconds, until its store answers."""
    monkeypatch.setattr(in_time._within, "seconds", 0)
    install(app, rates={"tell_time": "1/m"})
    with Clock(app) as clock:
        send(app, "tell_time")
        clock.advance()
    assert len(ran) == 1


def test_concurrent_tasks_give_their_locks_back_on_the_clock(app: Celery, ran: list[Any]) -> None:
    """Also a task that is retried, or waits for another limit."""
    limits = [Rate(concurrent=1), Rate("2/h", name="hourly")]
    install(app, rates={"note": Rate(concurrent=1), "flaky": Rate(concurrent=1), "again": limits})
    with Clock(app) as clock:
        start = clock.now
        for number in range(3):
            send(app, "note", number)
        send(app, "flaky", 2)
        clock.advance(minutes=2.1)
        assert [each for each in ran if isinstance(each, int)] == [0, 1, 2]
        assert [each[1] for each in ran if isinstance(each, tuple)] == [0, 1, 2]
        ran.clear()
        send(app, "again", 60)
        clock.advance(hours=2)
    assert [(at - start) // timedelta(minutes=30) for at in ran] == [0, 1, 2, 3]


def test_a_hold_by_a_task_counts_for_the_tasks_after_it(
    app: Celery, clock: Clock, ran: list[Any]
) -> None:
    @app.task(name="break")
    def break_() -> None:
        Delay(app).hold("note", seconds=3 * 3600)

    send(app, "break", countdown=60)
    for hour in range(5):
        send(app, "note", hour, countdown=hour * 3600)
    clock.advance(hours=3)
    assert ran == [0]
    clock.advance(hours=1)
    assert ran == [0, 1, 2, 3, 4]


def test_schedule_entries_run_on_the_clock(app: Celery, ran: list[Any]) -> None:
    """Each run publishes the next one, which the clock meets on its way."""
    app.conf.beat_schedule = {
        "nightly": {"task": "note", "schedule": crontab(hour=2, minute=30), "args": ["night"]},
        "often": {"task": "note", "schedule": timedelta(hours=6), "args": ["six"]},
    }
    install(app, schedules=True)
    with Clock(app) as clock:
        clock.advance(days=5)
        assert (ran.count("night"), ran.count("six")) == (5, 20)
        Delay(app).schedules().pause("often")
        clock.advance(days=1)
    assert (ran.count("night"), ran.count("six")) == (6, 20)


@pytest.mark.parametrize("waits", ["for its rate", "for a release"])
def test_a_run_of_an_entry_that_waits_again_runs_and_is_not_taken_for_one_of_beat(
    app: Celery, ran: list[Any], waits: str
) -> None:
    app.conf.beat_schedule = {"often": {"task": "note", "schedule": 600, "args": ["often"]}}
    install(app, schedules=True, rates={"note": "3/h" if waits == "for its rate" else "100/s"})
    with Clock(app) as clock:
        delay = Delay(app)
        if waits == "for a release":
            delay.hold("note")
            clock.advance(hours=2)
            assert ran == []
            delay.release("note")
        clock.advance(hours=2)
        assert len(ran) == (24 if waits == "for a release" else 6)
        assert delay.schedules().beat() is None


def test_a_thousand_tasks_of_three_months_run_within_seconds(
    app: Celery, clock: Clock, ran: list[Any]
) -> None:
    """1.5 s of CPU time on a quiet machine. A step that looks at all tasks would take minutes."""
    before = time.process_time()
    for number in range(1000):
        send(app, "note", number, countdown=number * 90 * DAY / 1000)
    clock.advance(days=90)
    assert ran == [*range(1000)]
    assert time.process_time() - before < 10


def test_the_time_of_a_chord_grows_with_its_parts_not_with_their_square(
    app: Celery, clock: Clock, ran: list[Any]
) -> None:
    before = time.process_time()
    header = [app.tasks["note"].s(number) for number in range(600)]
    chord(header, app.tasks["note"].s()).apply_async()
    assert clock.run_all() == 601
    assert ran[-1] == [*range(600)]
    assert time.process_time() - before < 8


# ---- run_all and limits --------------------------------------------------------------------------


def test_run_all_and_advance_run_what_waits_up_to_their_limit(
    app: Celery, clock: Clock, ran: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    send(app, "flaky", 2, countdown=DAY)
    send(app, "note", "now")
    assert clock.run_all() == len(ran) == 4
    send(app, "again", 60)
    with pytest.raises(StillWaiting, match="5 tasks ran"):
        clock.run_all(limit=5)
    assert len(ran) == 9
    monkeypatch.setattr(clock_module, "MOST_AT_ONE_MOMENT", 50)
    send(app, "at_once")
    with pytest.raises(StillWaiting, match="50 tasks ran"):
        clock.advance(seconds=1)


def test_a_clock_never_goes_back_and_takes_the_time_zone_of_the_app(app: Celery) -> None:
    app.conf.timezone = "America/New_York"
    with Clock(app) as clock:
        with pytest.raises(ValueError, match="expected a time from"):
            clock.advance(seconds=-1)
        with pytest.raises(TypeError, match="expected a datetime"):
            clock.advance_to("2030-01-01")  # type: ignore[arg-type]
        clock.advance_to(datetime(2030, 1, 1, 12))
        assert clock.now == datetime(2030, 1, 1, 17, tzinfo=UTC)


def test_a_second_clock_is_an_error_and_leaves_the_first_clock(
    app: Celery, clock: Clock, ran: list[Any]
) -> None:
    """Time can stop only once; the end of an inner clock would start it again."""
    send(app, "note", "waits", countdown=60)
    for second in (Clock(app), Clock(install(Celery("other", set_as_current=False))), clock):
        with pytest.raises(RuntimeError, match="one clock at a time"):
            second.__enter__()
    clock.advance(minutes=1)
    assert ran == ["waits"]


# ---- errors --------------------------------------------------------------------------------------


@pytest.mark.parametrize("raises", [True, False])
def test_an_error_of_a_task_is_raised_in_the_test_or_collected(
    app: Celery, ran: list[Any], raises: bool
) -> None:
    """Raised, the clock stands at the due time of that task, and later tasks still wait."""
    with Clock(app, raises=raises) as clock:
        start = clock.now
        send(app, "fail", "no such order", countdown=60)
        app.send_task("misspelled", countdown=90)
        send(app, "note", "later", countdown=120)
        expected = [LookupError, NotRegistered]
        while raises and expected:
            with pytest.raises(expected.pop(0), match=r"no such order|misspelled"):
                clock.advance(minutes=5)
            assert clock.now == start + timedelta(minutes=1 if expected else 1.5)
        clock.advance(minutes=5)
        assert [type(error) for error in clock.errors] == expected
    assert ran == ["later"]


def test_an_assertion_of_pytest_inside_a_task_ends_the_test(app: Celery, clock: Clock) -> None:
    """Also in a task that was defined during the test."""

    @app.task(name="asserting")
    def asserting() -> None:
        pytest.fail("not expected")

    asserting.apply_async(countdown=60)
    with pytest.raises(pytest.fail.Exception, match="not expected"):
        clock.advance(minutes=2)


def test_waiting_for_a_result_inside_a_task_fails_as_in_a_worker(app: Celery) -> None:
    @app.task(name="waiting")
    def waiting() -> None:
        app.tasks["note"].delay(1).get(timeout=5)

    with Clock(app) as clock:
        waiting.delay()
        with pytest.raises(RuntimeError, match=r"Never call result.get\(\) within a task"):
            clock.advance()


def test_an_app_needs_install() -> None:
    with pytest.raises(SettingsError, match="install"), Clock(Celery("plain")):
        pass


# ---- the app, before and after -------------------------------------------------------------------


def test_the_app_is_afterwards_as_it_was(app: Celery, ran: list[Any]) -> None:
    """Also if the test failed; its waiting messages are gone."""
    install(app, rates={"note": "1/s"})
    conf, queues, backend = dict(app.conf), memory.Channel.queues, app.backend
    consumed = set(app.amqp.queues)
    tasks = own_attributes(app)
    current = current_app._get_current_object()
    for _ in range(2):
        with pytest.raises(LookupError):
            fail_under_a_clock(app)
        assert dict(app.conf) == conf
        assert app.connection_for_write().hostname == "nowhere.invalid"
        assert memory.Channel.queues is queues
        assert set(app.amqp.queues) == consumed
        assert app.backend is backend
        assert own_attributes(app) == tasks
        assert current_app._get_current_object() is current
        assert now.stopped_at_ns is None
        assert abs(datetime.now(UTC).timestamp() - time.time()) < 5
        assert "now" not in vars(app)
    assert app.tasks["note"].delay("eager").get() == "eager"
    assert ran == ["eager"]


def test_settings_of_a_test_end_with_its_clock(app: Celery) -> None:
    """Those of install(), too: it writes the clock's store into the configuration."""
    app.conf.native_delay_store = "sqlite:////nowhere/shop.db"
    settings, conf = installed(app).settings(), dict(app.conf)
    with Clock(app):
        install(app, rates={"note": "1/s"}, keys={"note": Unique(key="what")})
        app.conf.task_default_queue = "another"
    assert installed(app).settings() == settings
    assert dict(app.conf) == conf
    assert installed(app).declared_key("note", None) is None


def test_the_own_result_backend_is_not_opened() -> None:
    """A new backend in a database connects to it, and creates its tables."""
    backend = "db+sqlite:////nowhere/results.db"
    app = install(Celery("shop", broker=UNREACHABLE, backend=backend, set_as_current=False))

    @app.task(name="echo", shared=False)
    def echo(what: int) -> int:
        return what

    with Clock(app) as clock:
        result = echo.delay(7)
        clock.advance()
        assert result.get() == 7


def test_a_test_may_use_the_task_ids_of_an_earlier_test(app: Celery, ran: list[Any]) -> None:
    for _ in range(2):
        with Clock(app) as clock:
            send(app, "note", "in time", countdown=60, task_id="one")
            send(app, "note", "expired", countdown=60, expires=30, task_id="two")
            clock.run_all()
            assert Delay(app).cancel("one").verdict is Verdict.UNKNOWN
            send(app, "note", "cancelled", countdown=60, task_id="three")
            assert Delay(app).cancel("three")
            clock.run_all()
    assert ran == ["in time"] * 2


@pytest.mark.parametrize("setting", [{"store": "redis://nowhere"}, {"telemetry": "/nowhere"}])
def test_the_clock_replaces_what_a_setting_names(
    app: Celery, ran: list[Any], setting: dict[str, str]
) -> None:
    install(app, **setting)
    with Clock(app) as clock:
        send(app, "note", "ran", countdown=60)
        clock.advance(minutes=1)
    assert ran == ["ran"]


def test_a_wrong_setting_is_raised_and_changes_nothing(app: Celery) -> None:
    app.conf.native_delay_declare = 99
    with pytest.raises(SettingsError, match="native_delay_declare"), Clock(app):
        pass
    assert app.connection_for_write().hostname == "nowhere.invalid"


@pytest.mark.parametrize("fails", [False, True])
def test_the_body_of_a_chord_runs_although_its_header_ignores_results(
    app: Celery, ran: list[Any], fails: bool
) -> None:
    """As with Celery's Redis backend, which keeps the results of a header by itself."""

    @app.task(name="header", ignore_result=True)
    def header(number: int) -> int:
        if fails and number == 2:
            raise OSError("refused")
        return number

    @app.task(name="body")
    def body(numbers: list[int]) -> None:
        ran.append(numbers)

    @app.task(name="failed")
    def failed(*_: Any) -> None:
        ran.append("failed")

    with Clock(app, raises=False) as clock:
        whole = chord([header.s(n).set(countdown=n) for n in (1, 2)])
        whole(body.s().on_error(failed.si()).set(countdown=60))
        clock.advance(minutes=2)
    assert ran == (["failed"] if fails else [[1, 2]])


def test_without_a_fixture_the_clock_has_the_current_app(pytester: pytest.Pytester) -> None:
    """Each process of pytest-xdist has a clock of its own."""
    pytester.makepyfile(
        """
        import pytest
        from celery import Celery, shared_task
        from celery_native_delay import install

        install(Celery("shop", broker="sqs://"))
        mails = []

        @shared_task
        def remind(order):
            mails.append(order)

        @pytest.mark.parametrize("order", range(4))
        def test_reminder(native_delay_clock, order):
            mails.clear()
            remind.apply_async((order,), countdown=3 * 86400)
            native_delay_clock.advance(days=3)
            assert mails == [order]
        """
    )
    result = pytester.runpytest_subprocess("-Werror", "-pno:cacheprovider", "-n2")
    result.assert_outcomes(passed=4)


def test_tasks_of_transactions_run_although_the_clock_has_its_own_store(ran: list[Any]) -> None:
    app = install(Celery("shop", broker=UNREACHABLE), store="django")

    @app.task(name="remind", once="transaction")
    def remind(order: int) -> None:
        ran.append(order)

    @app.task(name="charge")
    def charge(order: int) -> None:
        engine = create_engine("sqlite://")
        with Session(engine) as session, in_transaction(app, session, once=True):
            remind.apply_async((order,), countdown=DAY)
            session.commit()

    for order in (1, 2):
        with Clock(app) as clock:
            charge.delay(order)
            clock.advance(days=1)
    assert ran == [1, 2]

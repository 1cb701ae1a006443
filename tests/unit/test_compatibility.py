"""What an earlier release has written to brokers and stores can be read by this one.

``golden/written_1.json`` and ``golden/store_1.sql`` stay as they are from 1.0 on. If this release
writes something else, increase the VERSION of the format, and write files with the next number:
``python -m tests.unit.test_compatibility 2``. Later releases read all files.
"""

from __future__ import annotations

import json
import re
import sqlite3
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from celery.schedules import crontab, schedule

from celery_native_delay.keyed.record import Mark, Record, Run
from celery_native_delay.message import Delayed
from celery_native_delay.rates.line import Line, places_in
from celery_native_delay.rates.rate import Rate
from celery_native_delay.records.cancelled import note_cancelled, was_cancelled
from celery_native_delay.records.interface import Change, RecordName, Snapshot
from celery_native_delay.schedules.entry import ScheduleEntry
from celery_native_delay.schedules.release import Release, Rival, rivalled, taken_over
from celery_native_delay.schedules.state import Occurrence, State, occurrence_of
from celery_native_delay.store.entry import StoreEntry
from celery_native_delay.store.interface import Refusal, Row, Store
from celery_native_delay.store.opened import store_at
from celery_native_delay.transports.rabbitmq.wrapping import unwrap, wrap
from celery_native_delay.transports.redis.keys import Destination, entry_of, opened_entry
from celery_native_delay.transports.sqs import entry as sqs
from celery_native_delay.transports.virtual.from_store import message_of
from celery_native_delay.transports.virtual.wrapping import unwrapped, wrapped

GOLDEN = Path(__file__).parent / "golden"

#: 2026-11-20 09:00 UTC.
DUE_US = 1_795_165_200_000_000
NOW_US = DUE_US - 90_000_000

#: Later than any test runs, in microseconds.
FAR_US = 10**17

TASK = {
    "lang": "py",
    "task": "shop.remind",
    "id": "5f2b0a1c-6d1e-4f7a-9a55-2c5a7c9f1b10",
    "eta": "2026-11-20T09:00:00+00:00",
    "expires": "2026-11-21T09:00:00+00:00",
    "retries": 1,
    "argsrepr": "('ada',)",
}
BODY = '[["ada"], {"order": "№ 7"}, {"callbacks": null}]'

# ---- each format: how it is written, and how it is read ------------------------------------------

PROPERTIES = {
    "content_type": "application/json",
    "content_encoding": "utf-8",
    "delivery_mode": 2,
    "priority": 9,
    "expiration": "7200000",
    "user_id": "shop",
    "application_headers": {**TASK, "x-opt-delivery-time": 1_795_165_300},
}
DELAYED = Delayed("7c1f", DUE_US, "orders", "eu.orders", None, NOW_US // 1000 + 7_200_000)
ARRIVED = {"exchange": "celery_delay.v1.31x125ms.f15.quorum.delivery", "routing_key": "0.1.%"}

MESSAGE = {
    "body": BODY,
    "content-type": "application/json",
    "content-encoding": "utf-8",
    "headers": TASK,
    "properties": {
        "delivery_tag": "b0e6",
        "delivery_mode": 2,
        "priority": 0,
        "delivery_info": {"exchange": "orders", "routing_key": "eu.orders"},
    },
}

#: The properties that a store's row keeps.
ROW = {"delivery_mode": 2, "correlation_id": TASK["id"], "application_headers": TASK}
#: What a debounce call, a rate limit, ``once`` and a schedule add to a task.
MARK = Mark("unique", "shop.remind", "ada № 7", "end", "9a3e")
PLACES = {"shop.remind\nada": 17, "api": -1}

STORED = {
    "a task": StoreEntry(DUE_US, "orders", "eu.orders", ROW, BODY.encode(), "7c1f"),
    "for one queue": StoreEntry(DUE_US, "", "eu", ROW, b"", "7c1f", "eu", DUE_US // 1000, True),
    "no text": StoreEntry(DUE_US, "", "eu", {"correlation_id": "c"}, b"\xff\0=", "7c1f"),
}
NOTHING = Snapshot(NOW_US, None)
KEYS = {
    "debounce": Record("5f2b", DUE_US, NOW_US),
    "throttle": Record("5f2b", DUE_US, window_us=DUE_US, opener="77aa"),
    "unique": Record(runs=(Run("5f2b", "9a3e", DUE_US),)),
    "concurrent": Record(due_us=DUE_US, runs=tuple(Run("5", str(n), DUE_US, n) for n in (1, 2))),
    "once": Record(window_us=DUE_US, opener="5f2b"),
}
LINE = Line(3, 9, DUE_US, DUE_US + 1, NOW_US, 4, 5, 60, 1, (NOW_US, NOW_US + 1))
RATE = Rate("100/m", burst=10)
ZONE = ZoneInfo("Europe/Berlin")
ENTRY = ScheduleEntry("nightly", "shop.report", crontab(minute="30", hour="2"), ZONE, ["ada"])
EVERY = ScheduleEntry("often", "shop.look", schedule(10.0), ZONE, [], options={"queue": "eu"})
RELEASE, RIVAL = Release("2026-11-20", "5f2b", ("nightly", "often")), Rival(NOW_US, ("other",))
STATE = State(
    ENTRY.text, "5f2b", 7, DUE_US, NOW_US, "77aa", 6, NOW_US, 1, False, None, "it expired", 2
)
DESTINATION = Destination(("eu", "eu\x06\x163"), 60_000)
BROADCAST = Destination(("/0.news",), broadcast=True)
SQS = sqs.SqsEntry("b0e6", 1_000_000, DUE_US // 1000, sqs.Payload("e30=", {"a": {"b": 1}}, "g"), 2)


def written() -> dict[str, Any]:
    """Everything as this release writes it."""
    held = {"now_us": NOW_US, "limit_priority": True, "user": "celery"}
    again = DELAYED._replace(queue="eu", expires_ms=None, cancelled=True)
    return {
        "RabbitMQ, a delayed task": wrap(PROPERTIES, DELAYED, **held),
        "RabbitMQ, put back and cancelled": wrap(ROW, again, **held),
        "RabbitMQ, from a store": STORED["a task"].told(),
        "other brokers, a delayed task": wrapped(MESSAGE, due_ms=DUE_US // 1000 + 5),
        "other brokers, cancelled": wrapped(
            MESSAGE, due_ms=DUE_US // 1000, cancelled=True, delivery_id="7c1f"
        ),
        "other brokers, from a store": message_of(STORED["a task"]),
        "Redis": entry_of(DESTINATION, BODY),
        "Redis, a broadcast": entry_of(BROADCAST, BODY),
        "SQS": SQS.text(),
        **{f"store, {name}": entry.encoded() for name, entry in STORED.items()},
        **{f"key, {name}": record.encoded() for name, record in KEYS.items()},
        "header of a key": MARK.header(),
        "header of places": json.dumps(PLACES),
        "header of an occurrence": {"v": 1, "app": "shop", "entry": "nightly", "number": 7},
        "line": LINE.encoded(RATE),
        "starts of a line": " ".join(map(str, LINE.log)),
        "schedule entry": ENTRY.text,
        "schedule entry, an interval": EVERY.text,
        "schedule state": STATE.encoded(),
        "release": taken_over(NOTHING, ours=RELEASE, is_new=True).text,
        "rival": rivalled(NOTHING, names=RIVAL.names).text,
    }


def read(text: dict[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """For each text: its name, what was read, and what is expected."""
    delayed, back = text["RabbitMQ, a delayed task"], text["RabbitMQ, put back and cancelled"]
    info = {"exchange": "orders", "routing_key": "eu.orders"}
    yield "RabbitMQ, a delayed task", unwrap(delayed, ARRIVED), (PROPERTIES, info, DELAYED)
    again = DELAYED._replace(queue="eu", expires_ms=None, cancelled=True)
    yield "RabbitMQ, put back and cancelled", unwrap(back, ARRIVED), (ROW, info, again)
    stored = Delayed("7c1f", DUE_US, "orders", "eu.orders", stored=True)
    yield (
        "RabbitMQ, from a store",
        unwrap(text["RabbitMQ, from a store"], info),
        (ROW, info, stored),
    )
    for name, expected in {
        "a delayed task": Delayed("b0e6", DUE_US + 5000, "orders", "eu.orders"),
        "cancelled": Delayed("7c1f", DUE_US, "orders", "eu.orders", cancelled=True),
    }.items():
        message = text[f"other brokers, {name}"]
        found = unwrapped(message["headers"], message["properties"])
        yield f"other brokers, {name}", found, (TASK, expected)
    message = text["other brokers, from a store"]
    headers, known = unwrapped(message["headers"], message["properties"])
    assert known is not None
    yield "other brokers, from a store", (headers, known.due_us, known.stored), (TASK, DUE_US, True)
    for name, destination in {"Redis": DESTINATION, "Redis, a broadcast": BROADCAST}.items():
        yield name, opened_entry(text[name].encode()), (destination, BODY.encode())
    yield "SQS", sqs.opened(text["SQS"]), SQS
    for name, entry in STORED.items():
        yield f"store, {name}", StoreEntry.decoded(text[f"store, {name}"]), entry
    for name, record in KEYS.items():
        yield f"key, {name}", Record.decoded(text[f"key, {name}"]), record
    marked = {"task": "shop.remind", "native_delay_key": text["header of a key"]}
    yield "header of a key", Mark.of(marked), MARK
    yield "header of places", places_in(text["header of places"]), PLACES
    occurrence = {"native_delay_schedule": text["header of an occurrence"]}
    yield "header of an occurrence", occurrence_of(occurrence), Occurrence("shop", "nightly", 7)
    line, rate = Line.decoded(text["line"], text["starts of a line"])
    yield "line", (line, rate and rate.shown), (LINE, RATE.shown)
    yield "starts of a line", line.log, LINE.log
    yield "schedule entry", ScheduleEntry.from_text(text["schedule entry"]), ENTRY
    often = ScheduleEntry.from_text(text["schedule entry, an interval"])
    yield "schedule entry, an interval", often, EVERY
    yield "schedule state", State.from_text(text["schedule state"]), STATE
    yield "release", Release.from_text(text["release"]), RELEASE
    yield "rival", Rival.from_text(text["rival"]), RIVAL


def numbers() -> list[str]:
    return sorted(path.stem.removeprefix("written_") for path in GOLDEN.glob("written_*.json"))


@pytest.mark.parametrize("number", numbers())
def test_this_release_reads_the_messages_and_states_of_all_releases(number: str) -> None:
    text = json.loads((GOLDEN / f"written_{number}.json").read_text())
    names = []
    for name, found, expected in read(text):
        assert found == expected, name
        names.append(name)
    assert names == list(text)


def test_this_release_writes_what_the_newest_golden_file_has() -> None:
    """A release whose workers run beside those of the last one must be read by both."""
    assert written() == json.loads((GOLDEN / f"written_{numbers()[-1]}.json").read_text())


# ---- a whole store -----------------------------------------------------------------------------

OWNER = "celery_delay./"
KEY = RecordName("key", "unique:shop.remind:ada")


def filled(store: Store) -> None:
    """Write a row of each state, a dispatcher's lease, a key and the id of a cancelled task."""
    store.prepare()

    def add(**due_us: int) -> None:
        for name, due in due_us.items():
            headers = {"application_headers": {**TASK, "id": name}}
            store.add([Row.of(StoreEntry(due, "", "eu", headers, BODY.encode(), name, "eu"))])

    add(parked=1)
    taken = store.take()
    store.settle(taken, [], [Refusal(taken.rows[0], "no queue eu", FAR_US, True)])
    add(taken=1)
    store.take()
    add(waiting=FAR_US, cancelled=FAR_US)
    assert store.tasks(None).cancel(["cancelled"])[0]
    assert store.leads("9f00")
    text = KEYS["unique"].encoded()
    store.state.change(KEY, lambda seen: Change(text, FAR_US, None))
    note_cancelled(store.state, "in the broker", kept_us=FAR_US)


@pytest.mark.parametrize(
    "path", sorted(GOLDEN.glob("store_[0-9]*.sql")), ids=lambda path: path.stem
)
def test_this_release_works_on_the_store_of_all_releases(path: Path, tmp_path: Path) -> None:
    """Rows and leases, as an earlier release has left them in a database."""
    with closing(sqlite3.connect(tmp_path / "store.db")) as database:
        database.executescript(path.read_text())
    with closing(store_at(f"sqlite:///{tmp_path}/store.db", OWNER, timeout_seconds=5)) as store:
        assert_works(store)


def assert_works(store: Store) -> None:
    """What :func:`filled` wrote is there; the taken row's lease has ended."""
    assert [each.entry.task_id for each in store.parked(9)] == ["parked"]
    assert list(store.tasks(None).ids()) == ["waiting"]
    assert Record.decoded(store.state.read(KEY).text or "") == KEYS["unique"]
    assert was_cancelled(store.state, "in the broker")
    assert store.leads("another")  # its predecessor's lease has ended
    store.release()
    taken = [StoreEntry.decoded(row.entry) for _ in range(2) for row in store.take().rows]
    assert {each.task_id: each.cancelled for each in taken} == {"cancelled": True, "taken": False}
    assert {each.body for each in taken} == {BODY.encode()}


def in_the_past(text: str) -> str:
    """The times of *text* that are near now, long ago."""
    return re.sub(rf"\b{str(time.time_ns())[:5]}\d{{11}}\b", "1700000000000000", text)


if __name__ == "__main__":
    texts = json.dumps(written(), indent=1, ensure_ascii=False)
    (GOLDEN / f"written_{sys.argv[1]}.json").write_text(f"{texts}\n")
    with TemporaryDirectory() as folder:
        with closing(store_at(f"sqlite:///{folder}/store.db", OWNER, timeout_seconds=5)) as made:
            filled(made)
        with closing(sqlite3.connect(f"{folder}/store.db")) as database:
            dump = "\n".join(database.iterdump())
        (GOLDEN / f"store_{sys.argv[1]}.sql").write_text(in_the_past(f"{dump}\n"))

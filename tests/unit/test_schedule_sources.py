"""Schedule entries are read by the scheduler that Celery's setting ``beat_scheduler`` names."""

from __future__ import annotations

from typing import Any

import pytest
from celery import Celery
from celery.beat import Scheduler

from celery_native_delay import SettingsError, install
from celery_native_delay.app import beat
from celery_native_delay.app.schedules import Schedules


class OwnScheduler(Scheduler):
    """Takes what Celery's beat passes by keyword, as sqlalchemy-celery-beat and redisbeat do."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        assert not args
        assert {"app", "schedule_filename", "max_interval", "lazy"} == {*kwargs}
        super().__init__(**kwargs)

    def setup_schedule(self) -> None:
        self.add(name="own", task="shop.own", schedule=60.0)


class RedBeatScheduler(Scheduler):
    __module__ = "redbeat.schedulers"


class OwnRedBeat(RedBeatScheduler):
    __module__ = "shop.beat"


def app_with(beat_scheduler: Any) -> Celery:
    app = Celery("shop", broker="redis://", set_as_current=False)
    app.conf.beat_scheduler = beat_scheduler
    return install(app, schedules=True)


def test_a_scheduler_is_made_as_celerys_beat_makes_it() -> None:
    assert [*Schedules(app_with(OwnScheduler))._read_entries()] == ["own"]


def test_a_scheduler_is_named_by_its_entry_point_as_for_celerys_beat(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    points = (("shop", f"{__name__}:OwnScheduler"),)
    monkeypatch.setattr(beat, "load_extension_class_names", lambda _: points)
    assert [*Schedules(app_with("shop"))._read_entries()] == ["own"]


@pytest.mark.parametrize("kind", [RedBeatScheduler, OwnRedBeat])
def test_redbeat_is_refused_by_name_with_the_way_out(kind: Any) -> None:
    """Its ``schedule`` has only the entries that are due now, so entries would come and go."""
    with pytest.raises(SettingsError, match=r"got .*RedBeat.*Move these entries to beat_schedule"):
        Schedules(app_with(kind))._read_entries()


def test_an_unknown_scheduler_is_an_error_of_the_setting() -> None:
    with pytest.raises(SettingsError, match=r"expected beat_scheduler to name .*got 'djnago'"):
        Schedules(app_with("djnago"))._read_entries()

"""Flower's templates with our additions, and the questions that its pages ask."""

from __future__ import annotations

import asyncio
from pathlib import Path
from threading import Event

import flower as stock
import pytest
from celery import Celery

from celery_native_delay import RecordsUnavailable, SettingsError, install
from celery_native_delay.flower.app import PatchedTemplates, patched
from celery_native_delay.flower.asking import Asking

TEMPLATES = Path(stock.__file__).parent / "templates"


def test_flowers_bar_has_a_place_for_our_links() -> None:
    text = (TEMPLATES / "navbar.html").read_text()
    assert patched("navbar.html", text) != text
    PatchedTemplates().load("navbar.html")


def test_a_template_that_has_changed_too_much_stays_as_it_is() -> None:
    assert patched("navbar.html", "<nav></nav>") == "<nav></nav>"


def test_a_question_that_hangs_is_given_up() -> None:
    asking = Asking(install(Celery("slow", broker="redis://", set_as_current=False)))
    ends = Event()
    try:
        with pytest.raises(RecordsUnavailable, match=r"within 0\.05 s"):
            asyncio.run(asking.delay(lambda _: ends.wait(20), within_seconds=0.05))
    finally:
        ends.set()
        asking.stop()


def test_an_app_that_is_not_installed_is_told_how() -> None:
    asking = Asking(Celery("plain", broker="memory://", set_as_current=False))
    for question in (asking.admin(lambda part: part.status()), asking.delay(lambda it: it.count())):
        with pytest.raises(SettingsError, match="install"):
            asyncio.run(question)
    asking.stop()

"""Flower's templates with our additions, and the requests that our pages make."""

from __future__ import annotations

import asyncio
from pathlib import Path
from threading import Event

import flower as stock
import pytest
from celery import Celery

from celery_native_delay import SettingsError, StoreUnavailable, install
from celery_native_delay.flower.app import PatchedTemplates, patched
from celery_native_delay.flower.asking import Asking

TEMPLATES = Path(stock.__file__).parent / "templates"


def test_our_links_are_added_to_flowers_navigation_bar() -> None:
    text = (TEMPLATES / "navbar.html").read_text()
    assert patched("navbar.html", text) != text
    PatchedTemplates().load("navbar.html")


def test_an_unknown_template_stays_unchanged() -> None:
    assert patched("navbar.html", "<nav></nav>") == "<nav></nav>"


def test_a_request_that_hangs_times_out() -> None:
    asking = Asking(install(Celery("slow", broker="redis://", set_as_current=False)))
    ends = Event()
    try:
        with pytest.raises(StoreUnavailable, match=r"within 0\.05 s"):
            asyncio.run(asking.delay(lambda _: ends.wait(20), within_seconds=0.05))
    finally:
        ends.set()
        asking.stop()


def test_an_app_without_install_raises_and_names_install() -> None:
    asking = Asking(Celery("plain", broker="memory://", set_as_current=False))
    for question in (asking.admin(lambda part: part.status()), asking.delay(lambda it: it.count())):
        with pytest.raises(SettingsError, match="install"):
            asyncio.run(question)
    asking.stop()

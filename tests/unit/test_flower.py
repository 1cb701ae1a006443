"""Flower's templates with our additions, and the requests that our pages make."""

from __future__ import annotations

import asyncio

import pytest
from celery import Celery

from celery_native_delay import SettingsError
from celery_native_delay.flower.app import patched
from celery_native_delay.flower.asking import Asking


def test_an_unknown_template_stays_unchanged() -> None:
    assert patched("navbar.html", "<nav></nav>") == "<nav></nav>"


def test_an_app_without_install_raises_and_names_install() -> None:
    asking = Asking(Celery("plain", broker="memory://", set_as_current=False))
    for question in (asking.admin(lambda part: part.status()), asking.delay(lambda it: it.count())):
        with pytest.raises(SettingsError, match="install"):
            asyncio.run(question)
    asking.stop()

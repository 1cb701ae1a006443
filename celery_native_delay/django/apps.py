"""The configuration of the Django app."""

from __future__ import annotations

from django.apps import AppConfig


class NativeDelayConfig(AppConfig):
    name = "celery_native_delay.django"
    label = "native_delay"
    verbose_name = "delayed Celery tasks"

"""Stops ``celery beat`` from sending tasks if ``native_delay_schedules`` is True."""

from __future__ import annotations

from typing import Any

from celery import signals
from celery.beat import Scheduler
from celery.utils.log import get_logger

from .installation import installation_of

logger = get_logger(__name__)


class _Idle(Scheduler):  # type: ignore[misc]
    def setup_schedule(self) -> None: ...

    def tick(self, *args: Any, **kwargs: Any) -> float:
        return float(self.max_interval)


@signals.beat_init.connect(weak=False)  # type: ignore[untyped-decorator]
@signals.beat_embedded_init.connect(weak=False)  # type: ignore[untyped-decorator]
def keep_beat_idle(sender: Any = None, **_: Any) -> None:
    """Replace the scheduler of ``celery beat`` by an idle scheduler, and log why."""
    installation = installation_of(sender.app)
    if installation is None or not installation.delays_new:
        return
    if installation.settings().schedules:
        vars(sender)["scheduler"] = _Idle(sender.app)
        logger.warning(
            "native delay: this beat sends nothing and need not run: schedule entries wait in the "
            "broker (native_delay_schedules)"
        )

"""``Clock(app)``: runs delayed tasks in a test, without a broker or a worker."""

from .clock import Clock
from .running import StillWaiting

__all__ = ["Clock", "StillWaiting"]

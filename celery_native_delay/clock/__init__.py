"""``Clock(app)``: run delayed tasks in a test, without a broker, a worker or waiting."""

from .clock import Clock
from .running import StillWaiting

__all__ = ["Clock", "StillWaiting"]

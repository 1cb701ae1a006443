"""``Clock(app)``: runs delayed tasks in a test, without a broker or a worker."""

from .clock import Clock, StillWaiting

__all__ = ["Clock", "StillWaiting"]

"""Delayed messages on Amazon SQS, which can delay a message by up to 15 minutes.

A longer delay is split into several waits in the delay queue ``<queue>-delay.fifo``. After each
wait, a worker thread sends the message to the delay queue again. For the last wait, the thread
sends the message to the destination queue. Install ``celery_native_delay[sqs]``.
"""

from .transport import Channel, Transport

__all__ = ["Channel", "Transport"]

"""Delayed messages on Amazon SQS, which can delay a message by up to 15 minutes.

A longer delay is split into periods of up to 15 minutes. During the last period, the message is in
the destination queue. During each earlier period, the message is in the delay queue
``<queue>-delay.fifo``; when the period ends, a worker thread sends the message again.

Install ``celery_native_delay[sqs]``.
"""

from .transport import Channel, Transport

__all__ = ["Channel", "Transport"]

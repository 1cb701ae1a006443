"""Amazon SQS: a message waits up to 15 minutes in its own queue, and longer in a delay queue.

The delay queue is ``<queue>-delay.fifo``. Every 15 minutes a relay (a worker thread) sends the
message back to the delay queue. The last time, the relay sends the message to its own queue.
Install ``celery_native_delay[sqs]``.
"""

from .transport import Channel, Transport

__all__ = ["Channel", "Transport"]

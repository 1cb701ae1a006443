"""Amazon SQS: a message waits up to 15 minutes in its own queue, and longer in a delay queue.

The delay queue is ``<queue>-delay.fifo``. After 15 minutes a relay (a worker thread) sends each
message back there, or with the last ``DelaySeconds`` to its own queue. Install
``celery_native_delay[sqs]``.
"""

from .transport import Channel, Transport

__all__ = ["Channel", "Transport"]

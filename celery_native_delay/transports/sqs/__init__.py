"""Amazon SQS: up to 15 minutes a message waits in its own queue, longer in a delay queue.

The delay queue is ``<queue>-delay.fifo``. A relay receives messages from it, and sends them back
there or, with the last ``DelaySeconds``, to their queue. Needs ``pip install
'celery_native_delay[sqs]'``.
"""

from .transport import Channel, Transport

__all__ = ["Channel", "Transport"]

"""Amazon SQS: up to 15 minutes a message waits in its own queue, longer in a FIFO queue beside it.

What comes out of ``<queue>-delay.fifo`` a relay sends on: back there, or with the last
``DelaySeconds`` to its destination. Needs ``pip install 'celery_native_delay[sqs]'``.
"""

from .transport import Channel, Transport

__all__ = ["Channel", "Transport"]

"""Split long delays into periods of up to 15 minutes, the longest delay in SQS.

During the last period, the message is in the destination queue. During the earlier periods, the
message is in the delay queue. This module does no I/O.
"""

from __future__ import annotations

from dataclasses import dataclass

#: The longest wait in SQS, in seconds: the longest ``DelaySeconds``. Tests set a shorter wait.
HOP_SECONDS = 900

#: Seconds for which SQS recognises a deduplication id.
RECOGNISED_SECONDS = 300

#: How many messages one request sends, receives or deletes.
BATCH = 10


def seconds_up(milliseconds: int) -> int:
    """Convert *milliseconds* to seconds, rounded up, because SQS delays by whole seconds."""
    return max(0, -(-milliseconds // 1000))


@dataclass(frozen=True)
class Reception:
    """The times when SQS stored and delivered one message of a delay queue.

    In the methods, *delay_ms* is the delay that remained when SQS stored the message.
    """

    sent_ms: int
    first_received_ms: int
    receive_count: int
    #: The date of SQS's answer, in whole seconds. Needed if an earlier worker received the message.
    now_ms: int

    def left_ms(self, delay_ms: int) -> int:
        """Return the remaining delay in milliseconds, negative if the delay is over."""
        return delay_ms - max(0, self._received_ms - self.sent_ms)

    def is_last_hop(self, delay_ms: int) -> bool:
        """Return True if the worker must send the message to the destination queue now."""
        # While SQS recognises a repeated send, a second worker must decide as the first worker did.
        # So the message is never sent to both queues.
        if self._received_ms - self.first_received_ms < RECOGNISED_SECONDS * 1000:
            left = delay_ms - max(0, self.first_received_ms - self.sent_ms)
        else:
            left = self.left_ms(delay_ms)
        return seconds_up(left) <= HOP_SECONDS

    @property
    def _received_ms(self) -> int:
        first_ms = self.first_received_ms
        return first_ms if self.receive_count <= 1 else max(first_ms, self.now_ms)

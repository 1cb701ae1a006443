"""Split long delays into waits of up to 15 minutes, the longest delay in SQS. No I/O.

During each wait the message is in the delay queue. After each wait a relay (a worker thread) sends
the message back to the delay queue, or to the destination for the last part of the delay.
"""

from __future__ import annotations

from dataclasses import dataclass

#: The longest wait in SQS, in seconds: the longest ``DelaySeconds``. Tests set a shorter wait.
HOP_SECONDS = 900

#: Seconds for which SQS recognises a deduplication id.
RECOGNISED_SECONDS = 300

#: How many messages one request sends, receives or deletes.
BATCH = 10

#: How many requests one wait costs: one to receive, one to send, one to delete.
REQUESTS_PER_HOP = 3


def seconds_up(milliseconds: int) -> int:
    """Return *milliseconds* as seconds, rounded up, because SQS delays by whole seconds."""
    return max(0, -(-milliseconds // 1000))


def remainders(delay_ms: int) -> list[int]:
    """Return the remaining seconds of a delay at each send; the last send is to the destination.

    For 32 min 5 s these are 1,925 s, 1,025 s and 125 s.
    """
    left = seconds_up(delay_ms)
    hops = max(0, -(-left // HOP_SECONDS) - 1)
    return [left - hop * HOP_SECONDS for hop in range(hops + 1)]


@dataclass(frozen=True)
class Reception:
    """The times at which SQS delivered a message from a delay queue, by the clock of SQS.

    All times are in milliseconds since the epoch. *now_ms* is the date of the answer from SQS, in
    whole seconds. *now_ms* is needed if another worker received the message before, and died.
    """

    sent_ms: int
    first_received_ms: int
    receive_count: int
    now_ms: int

    def left_ms(self, delay_ms: int) -> int:
        """Return the rest of a delay in milliseconds; negative if the delay is over."""
        return delay_ms - max(0, self._received_ms - self.sent_ms)

    def is_last_hop(self, delay_ms: int) -> bool:
        """Return True if the message now goes to its destination, not back to the delay queue.

        While SQS recognises a repeated send, a second worker must decide as the first worker did.
        So the message is never sent to both queues.
        """
        if self._received_ms - self.first_received_ms < RECOGNISED_SECONDS * 1000:
            left = delay_ms - max(0, self.first_received_ms - self.sent_ms)
        else:
            left = self.left_ms(delay_ms)
        return seconds_up(left) <= HOP_SECONDS

    @property
    def _received_ms(self) -> int:
        first_ms = self.first_received_ms
        return first_ms if self.receive_count <= 1 else max(first_ms, self.now_ms)


def retry_seconds(receive_count: int) -> int:
    """Return the pause before a failed send is repeated; the pause grows with *receive_count*."""
    return min(1 << min(receive_count, 20), 900)

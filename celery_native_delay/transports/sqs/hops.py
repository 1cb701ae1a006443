"""Split long delays into waits of up to 15 minutes, the longest that SQS delays a message.

During each wait the message is in the delay queue. After each wait a relay (a worker thread) sends
the message back there, or to its destination if the rest of the delay is short enough. No I/O.
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
    """Return *milliseconds* as whole seconds, rounded up: SQS delays by whole seconds."""
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

    All times are in milliseconds since the epoch. *now_ms* is the date of SQS' answer, in whole
    seconds. *now_ms* matters if another relay received the message before, and died.
    """

    sent_ms: int
    first_received_ms: int
    receive_count: int
    now_ms: int

    def left_ms(self, delay_ms: int) -> int:
        """Return the remaining milliseconds of a delay; negative if the delay is over."""
        return delay_ms - max(0, self._received_ms - self.sent_ms)

    def is_last_hop(self, delay_ms: int) -> bool:
        """Return True if the relay (a worker thread) sends the message to its destination now.

        While SQS recognises a repeated send, the answer is what the first relay decided. Otherwise
        one relay could send to the destination, and another back to the delay queue.
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
    """Return the wait before another send; SQS has delivered the message *receive_count* times."""
    return min(1 << min(receive_count, 20), 900)

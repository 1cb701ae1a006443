"""The arithmetic of long delays in SQS, which delays a message for at most 15 minutes. Pure.

A longer delay is split into hops. For each hop the message waits in the delay queue. The relay that
receives it sends it back there, or to its destination if the rest is short enough.
"""

from __future__ import annotations

from dataclasses import dataclass

#: Seconds of one hop: the longest ``DelaySeconds`` of SQS. Tests set a shorter one.
HOP_SECONDS = 900

#: Seconds for which SQS recognises a deduplication id.
RECOGNISED_SECONDS = 300

#: Messages per request, to send, receive or delete them.
BATCH = 10

#: Requests per hop: one to receive, one to send, one to delete.
REQUESTS_PER_HOP = 3


def seconds_up(milliseconds: int) -> int:
    """Milliseconds as whole seconds, rounded up: SQS delays whole seconds, and never early."""
    return max(0, -(-milliseconds // 1000))


def remainders(delay_ms: int) -> list[int]:
    """The remaining seconds of a delay at each send. The last send is to the destination.

    32 min 5 s are sent with 1,925 s left, again with 1,025 s, and with the last 125 s.
    """
    left = seconds_up(delay_ms)
    hops = max(0, -(-left // HOP_SECONDS) - 1)
    return [left - hop * HOP_SECONDS for hop in range(hops + 1)]


@dataclass(frozen=True)
class Reception:
    """The times at which SQS delivered a message from a delay queue, by the clock of SQS.

    *sent_ms*, *first_received_ms* and *now_ms* are in milliseconds since the epoch. *now_ms* is the
    date of SQS' answer, in whole seconds. It counts if another relay received the message before
    and died.
    """

    sent_ms: int
    first_received_ms: int
    receive_count: int
    now_ms: int

    def left_ms(self, delay_ms: int) -> int:
        """The remaining milliseconds of a delay; negative if it is over."""
        return delay_ms - max(0, self._received_ms - self.sent_ms)

    def is_last_hop(self, delay_ms: int) -> bool:
        """True if the message goes to its destination now.

        While SQS recognises a repeated send, this is what the first relay has decided. Otherwise
        one relay could send the message to its destination, and another back to the delay queue.
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
    """Seconds until a message that could not be sent is tried again, by its receive count."""
    return min(1 << min(receive_count, 20), 900)

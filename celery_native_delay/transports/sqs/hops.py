"""The arithmetic of SQS: no wait there is longer than 15 minutes, so a long one is many. Pure.

A message waits in the delay queue for one hop at a time; the relay that receives it there sends it
on with what is left of its delay, at the end to its destination.
"""

from __future__ import annotations

from dataclasses import dataclass

#: Seconds of one hop, the longest ``DelaySeconds`` that SQS takes for a message or a queue. Tests
#: hop faster: it is read when it is needed.
HOP_SECONDS = 900

#: For so long SQS recognises a deduplication id, in seconds.
RECOGNISED_SECONDS = 300

#: Messages that one request sends, receives or deletes at most.
BATCH = 10

#: What each hop takes: one request to receive, one to send on, one to delete.
REQUESTS_PER_HOP = 3


def seconds_up(milliseconds: int) -> int:
    """Milliseconds in whole seconds, the resolution of SQS, rounded up: never early."""
    return max(0, -(-milliseconds // 1000))


def remainders(delay_ms: int) -> list[int]:
    """Seconds that are left of a delay at each send; the last one is to the destination.

    32 min 5 s are sent with 1,925 s left, again with 1,025 s, and with the last 125 s.
    """
    left = seconds_up(delay_ms)
    hops = max(0, -(-left // HOP_SECONDS) - 1)
    return [left - hop * HOP_SECONDS for hop in range(hops + 1)]


@dataclass(frozen=True)
class Reception:
    """The times of a message that comes out of a delay queue, all by the broker's clock.

    *sent_ms*, *first_received_ms* and *now_ms* are Unix times in milliseconds. If a relay received
    it before and died, *now_ms* says how late it is: the date of the broker's answer, in whole
    seconds, so that at most a second of its wait is counted too little.
    """

    sent_ms: int
    first_received_ms: int
    receive_count: int
    now_ms: int

    def left_ms(self, delay_ms: int) -> int:
        """Milliseconds that are left of a delay; below 0 if it is late."""
        return delay_ms - max(0, self._received_ms - self.sent_ms)

    def is_last_hop(self, delay_ms: int) -> bool:
        """True if it goes to its destination now.

        As the relay that received it first decided, as long as a second send of it is recognised:
        else the one would send it to the destination, and the other back.
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
    """Seconds that a message which could not be sent on rests, by how often it was received."""
    return min(1 << min(receive_count, 20), 900)

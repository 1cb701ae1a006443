"""Whether this process has let anything wait since it last looked: it wants to see that at once.

What others publish is read milliseconds after it was confirmed. To be sure of our own, a mark is
written behind it, which stays in the streams: not for every look of a monitor, then.
"""

from __future__ import annotations


class OwnWrites:
    """A number that changes with what this process publishes into the levels."""

    def __init__(self) -> None:
        self.count = 0

    def add(self) -> None:
        """Something was published; threads that do so at once may count as one."""
        self.count += 1


own_writes = OwnWrites()

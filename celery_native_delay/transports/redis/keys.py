"""The names of this package's Redis keys, and of messages in sorted sets. No I/O.

A new format of the values needs a new VERSION, because old messages wait under the old names.
"""

from __future__ import annotations

from base64 import urlsafe_b64encode
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

from ...records.redis_listing import IndexKeys
from ..virtual.wrapping import id_of

#: Version 1 had scores in milliseconds, and was never released.
VERSION = 2

#: How many bytes the digest in a message's name has. Collisions are practically impossible. A name
#: with a UUID has at most 52 characters, one of the sizes that Redis allocates.
_DIGEST_BYTES = 9


@dataclass(frozen=True)
class Keys(IndexKeys):
    """The Redis keys of one namespace; *prefix* is kombu's ``global_keyprefix``.

    A hash tag in the prefix (``{queue}:``) puts all keys into the cluster slot of the queues.
    """

    prefix: str
    namespace: str

    @property
    def space(self) -> str:
        """Return the common prefix of all keys, without the last dot."""
        return f"{self.prefix}{self.namespace}.v{VERSION}"

    @property
    def wake(self) -> str:
        """Return the sorted set that wakes a waiting worker when an earlier message is stored."""
        return f"{self.space}.wake"

    @property
    def promoting(self) -> str:
        """Return the key, with a TTL, that exists while a process moves due messages."""
        return f"{self.space}.promoting"

    @property
    def parked(self) -> str:
        """Return the sorted set of messages that their queue rejected, sorted by time."""
        return f"{self.space}.parked"

    @property
    def moving(self) -> str:
        """Return the key with the name of the message that ``delay migrate`` is moving."""
        return f"{self.space}.moving"

    def taken(self, outbox: str) -> str:
        """Return the set of batch numbers that Redis has stored for one bulk publisher."""
        return f"{self.space}.taken.{outbox}"


def member_of(message: Mapping[str, Any], destination: str) -> str:
    """Return the name of *message* in the sorted sets: ``<task id>:<digest>``.

    The digest (12 characters) is of the delivery tag and the destination. So retries, and copies in
    several queues, have different names.
    """
    return member(id_of(message), str(message["properties"]["delivery_tag"]), destination)


def member(name: str, delivery_tag: str, destination: str) -> str:
    """Return a message's name in the sorted sets: ``<task id>:<digest>``."""
    digest = blake2b(f"{delivery_tag}\n{destination}".encode(), digest_size=_DIGEST_BYTES).digest()
    return f"{name}:{urlsafe_b64encode(digest).decode()}"

"""The names of all keys of this package on a Redis broker, and the members of messages. Pure.

A change in what the keys hold needs a new VERSION: messages in production wait under the old names.
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

#: Bytes of the digest in a member. Collisions are practically impossible, and a member with a UUID
#: has at most 52 characters, one of the sizes that Redis allocates.
_DIGEST_BYTES = 9


@dataclass(frozen=True)
class Keys(IndexKeys):
    """The keys of one namespace, with kombu's ``global_keyprefix`` as *prefix*.

    With a hash tag in the prefix (``{queue}:``) they are in the same cluster slot as the queues.
    """

    prefix: str
    namespace: str

    @property
    def space(self) -> str:
        """The prefix of all keys, without the last dot."""
        return f"{self.prefix}{self.namespace}.v{VERSION}"

    @property
    def wake(self) -> str:
        """Sorted set that wakes a promoter: a message was stored that is due before all others."""
        return f"{self.space}.wake"

    @property
    def promoting(self) -> str:
        """String with a TTL: a promoter is running."""
        return f"{self.space}.promoting"

    @property
    def parked(self) -> str:
        """Sorted set: parked messages by the time in microseconds at which they were refused."""
        return f"{self.space}.parked"

    @property
    def moving(self) -> str:
        """String: the member of the message that is being moved to another broker."""
        return f"{self.space}.moving"

    def taken(self, outbox: str) -> str:
        """Set: the numbers of the batches of an outbox that the server has stored."""
        return f"{self.space}.taken.{outbox}"


def member_of(message: Mapping[str, Any], destination: str) -> str:
    """The member of *message* for *destination*: ``<task id>:<digest of 12 characters>``.

    The digest is of delivery tag and destination: a retry has the same task id as the attempt
    before it, and copies for several queues have the same delivery tag.
    """
    return member(id_of(message), str(message["properties"]["delivery_tag"]), destination)


def member(name: str, delivery_tag: str, destination: str) -> str:
    """The member of :func:`member_of`, for a task with the id *name*."""
    digest = blake2b(f"{delivery_tag}\n{destination}".encode(), digest_size=_DIGEST_BYTES).digest()
    return f"{name}:{urlsafe_b64encode(digest).decode()}"

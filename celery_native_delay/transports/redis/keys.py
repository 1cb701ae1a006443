"""Every name that this package uses in Redis, and which entry is whose.

Rule 1: all names are decided here. Rule 2: no I/O. Rule 3: a change in what the keys hold is a
new VERSION beside the old one, never an edit: messages in production wait under the old names.
"""

from __future__ import annotations

from base64 import urlsafe_b64encode
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

from ...records.redis_listing import IndexKeys
from ..virtual.wrapping import id_of

#: 1 had its scores in milliseconds, and was never released.
VERSION = 2

#: Bytes of the digest that tells messages of one task id apart: collisions stay unreachable,
#: and a member with a UUID stays within 52 characters, the memory class that Redis rounds it to.
_DIGEST_BYTES = 9


@dataclass(frozen=True)
class Keys(IndexKeys):
    """The keys of one namespace behind kombu's ``global_keyprefix``.

    The prefix comes first, so that a hash tag in it (``{queue}:``) puts them into the slot of the
    queues themselves.
    """

    prefix: str
    namespace: str

    @property
    def space(self) -> str:
        """The prefix of all keys, without the last dot."""
        return f"{self.prefix}{self.namespace}.v{VERSION}"

    @property
    def wake(self) -> str:
        """Sorted set with one member at most: something came that is due before all others."""
        return f"{self.space}.wake"

    @property
    def promoting(self) -> str:
        """String with a TTL: there is a promoter."""
        return f"{self.space}.promoting"

    @property
    def parked(self) -> str:
        """Sorted set: member → when its destination refused it, in microseconds."""
        return f"{self.space}.parked"

    @property
    def moving(self) -> str:
        """String: the member that is being moved to another broker."""
        return f"{self.space}.moving"

    def taken(self, outbox: str) -> str:
        """Set: the numbers of what an outbox has sent and the server has taken."""
        return f"{self.space}.taken.{outbox}"


def member_of(message: Mapping[str, Any], destination: str) -> str:
    """The member under which *message* waits for *destination*: ``<task id>:<12 characters>``.

    Not the task id alone, which a retry shares with the attempt before it; nor with the delivery
    tag alone, which copies for several queues share. The same message has the same one again.
    """
    return member(id_of(message), str(message["properties"]["delivery_tag"]), destination)


def member(name: str, delivery_tag: str, destination: str) -> str:
    """The member of :func:`member_of` for a task whose id is *name*."""
    digest = blake2b(f"{delivery_tag}\n{destination}".encode(), digest_size=_DIGEST_BYTES).digest()
    return f"{name}:{urlsafe_b64encode(digest).decode()}"

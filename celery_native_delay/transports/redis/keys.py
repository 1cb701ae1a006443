"""The names of all Redis keys of this package, and of messages in the sorted sets. No I/O.

A change in the keys' contents needs a new VERSION, because messages wait under the old names.
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
    """The Redis keys of one namespace, with kombu's ``global_keyprefix`` as *prefix*.

    A hash tag in *prefix* (``{queue}:``) puts these keys into the queues' cluster slot.
    """

    prefix: str
    namespace: str

    @property
    def space(self) -> str:
        """Return the common prefix of all keys of this package, without the last dot."""
        return f"{self.prefix}{self.namespace}.v{VERSION}"

    @property
    def wake(self) -> str:
        """Return the sorted set that wakes a promoter if a message is stored that is due first."""
        return f"{self.space}.wake"

    @property
    def promoting(self) -> str:
        """Return the key, with a TTL, that exists while a promoter runs."""
        return f"{self.space}.promoting"

    @property
    def parked(self) -> str:
        """Return the sorted set of messages that their queue rejected, by time in µs."""
        return f"{self.space}.parked"

    @property
    def moving(self) -> str:
        """Return the key that names the message that ``delay migrate`` is moving at present."""
        return f"{self.space}.moving"

    def taken(self, outbox: str) -> str:
        """Return the set of batch numbers that the server has stored for one bulk publisher."""
        return f"{self.space}.taken.{outbox}"


def member_of(message: Mapping[str, Any], destination: str) -> str:
    """Return the name of *message* in the sorted sets: ``<task id>:<digest of 12 characters>``.

    The digest is of delivery tag, which differs between retries, and destination, which differs
    between copies for several queues.
    """
    return member(id_of(message), str(message["properties"]["delivery_tag"]), destination)


def member(name: str, delivery_tag: str, destination: str) -> str:
    """Return a message's name in the sorted sets, as :func:`member_of`, by task id *name*."""
    digest = blake2b(f"{delivery_tag}\n{destination}".encode(), digest_size=_DIGEST_BYTES).digest()
    return f"{name}:{urlsafe_b64encode(digest).decode()}"

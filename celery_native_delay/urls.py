"""Hides passwords in URLs, converts URLs for redis-py, and reads the prefix of table names."""

from __future__ import annotations

import re
from urllib.parse import unquote

# The password of `user:password@`, whatever characters it has; and libpq's parameter `password=`.
_PASSWORD = re.compile(r"(?<=://)([^/:@?#]*):.*(?=@)|(?<=[?&]password=)[^&]*")

#: Begins the names of tables and their indexes, if the user chooses no other prefix.
TABLE_PREFIX = "native_delay_"

# PostgreSQL makes letters small, and cuts names after 63 bytes. The longest rest has 11.
_TABLE_PREFIX = re.compile(r"[a-z_][a-z0-9_]{0,49}")
_GIVEN_PREFIX = re.compile(r"[?&]native_delay_prefix=([^&]*)")

EXPECTED_TABLE_PREFIX = "1 to 50 of the characters a-z, 0-9 and _, and no digit at its beginning"

# One of Python's names, such as CERT_REQUIRED. kombu accepts them, too.
_CERTIFICATES = re.compile(r"(?<=[?&]ssl_cert_reqs=)CERT_(\w+)")

# The user and password of kombu's URL, and the class that gives others.
_PROVIDER = re.compile(r"[?&]credential_provider=([^&]*)")
_USER = re.compile(r"(?<=://).*@")


def without_password(url: str) -> str:
    return _PASSWORD.sub(lambda found: "**" if found[1] is None else f"{found[1]}:**", url)


def redis_py_url(url: str) -> str:
    """Convert kombu's *url* of a Redis server to the form that redis-py needs."""
    url = _CERTIFICATES.sub(lambda found: found[1].lower(), url)
    if not url.startswith("redis+socket://"):
        return url
    return url.replace("redis+socket://", "unix://", 1).replace("virtual_host=", "db=")


def without_credential_provider(url: str) -> tuple[str, str | None]:
    """Split kombu's *url* of a Redis server at the name of its class of credentials.

    Returns the URL without the name, and without the user and password that kombu then ignores, and
    the name. The name is None if the URL has none.
    """
    found = _PROVIDER.search(url)
    if found is None:
        return url, None
    rest = url[: found.start()] + url[found.end() :].replace("&", found[0][0], 1)
    return _USER.sub("", rest), unquote(found[1])


def is_table_prefix(value: object) -> bool:
    return isinstance(value, str) and _TABLE_PREFIX.fullmatch(value) is not None


def table_prefix_of(url: str) -> str | None:
    """Return the prefix of table names in the URL of a database, which may be invalid, or None."""
    found = _GIVEN_PREFIX.findall(url)
    return "&".join(found) if found else None


def is_redis_url(url: str) -> bool:
    return url.startswith(("redis://", "rediss://", "redis+socket://", "sentinel://"))

"""URLs as they may be shown."""

from __future__ import annotations

import re

# The password of `user:password@`, whatever stands in it: rather too much is hidden; and one given
# as a parameter, as libpq takes it.
_PASSWORD = re.compile(r"(?<=://)([^/:@?#]*):.*(?=@)|(?<=[?&]password=)[^&]*")


def without_password(url: str) -> str:
    """*url* with ``**`` where its password stands; all else of it tells it from others."""
    return _PASSWORD.sub(lambda found: "**" if found[1] is None else f"{found[1]}:**", url)

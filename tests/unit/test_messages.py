"""Every message of the log and every finding of doctor is in the docs, by its words."""

from __future__ import annotations

import re

from tests.documents import ROOT
from tests.messages import messages

PAGES = ("docs/guides/trouble.md", "docs/reference/messages.md")


def test_every_message_is_found_by_its_words() -> None:
    """A page quotes the beginning of a fixed part of its text."""
    told = "".join((ROOT / page).read_text() for page in PAGES)
    quoted = [_plain(words) for words in re.findall(r"`([^`\n]+)`", told)]
    found = [(where, list(map(_plain, parts))) for where, parts in messages() if parts]
    assert len(found) > 100
    missing = [
        (where, parts)
        for where, parts in found
        if not any(words in each for words in _telling(parts) for each in quoted)
    ]
    assert missing == []


def _plain(text: str) -> str:
    return re.sub(r"\s+", " ", re.sub("native delay:|`", "", text)).strip(" ,.;:()\"'…")


def _telling(parts: list[str]) -> list[str]:
    """The first four words of each part that is not only "is" or "and"."""
    longest = max(parts, key=len)
    return [" ".join(part.split()[:4]) for part in parts if part == longest or part.count(" ") > 1]

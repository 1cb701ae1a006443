"""Short sentences and one spelling; promises have their tests, messages their place in the docs."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from scripts.promises import functions_of, headings, pages, promises
from tests.messages import messages

ROOT = Path(__file__).parents[2]
GLOSSARY = ROOT / "docs" / "how-it-works" / "glossary.md"

PAGES = [
    *(ROOT / name for name in ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "SECURITY.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
]

MOST_WORDS = 30

#: A page's blocks of code and other directives; the text of a note stays.
_CODE_BLOCK = re.compile(r"^```.*?^```$|^:::.*?$", re.MULTILINE | re.DOTALL)

#: The beginning of a paragraph of its own: an item, a heading, a quotation.
_ITEM = re.compile(r"^([-*>]|\d+\.|#+) +")


def _paragraphs(page: str) -> Iterator[str]:
    """Texts without code and links; each item of a list and each cell of a table is one."""
    page = _CODE_BLOCK.sub("", page)
    page = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", re.sub(r"`[^`]*`", "code", page))
    lines: list[str] = []
    for line in [*page.splitlines(), ""]:
        text = line.strip()
        if lines and (not text or text.startswith("|") or _ITEM.match(text)):
            yield " ".join(lines)
            lines = []
        if text.startswith("|"):
            yield from text.split("|")
        elif text:
            lines.append(_ITEM.sub("", text))


def test_a_sentence_of_the_docs_is_short() -> None:
    """A colon or a semicolon ends no sentence."""
    sentences = [
        (path.relative_to(ROOT).as_posix(), sentence)
        for path in PAGES
        for paragraph in _paragraphs(path.read_text())
        for sentence in re.split(r"(?<=[.!?])[*_)\"']*\s", paragraph)
    ]
    assert len(sentences) > 1000
    long = [each for each in sentences if len(re.findall(r"\S*\w\S*", each[1])) > MOST_WORDS]
    assert long == []


#: The field's terms, as everybody else spells them.
_SPELLED = (
    "RabbitMQ",
    "Celery",
    "Redis",
    "Valkey",
    "PostgreSQL",
    "MariaDB",
    "MySQL",
    "SQLite",
    "SQLAlchemy",
    "Django",
    "Flower",
    "Prometheus",
    "Grafana",
    "Kubernetes",
    "Spark",
    "Sentinel",
    "NServiceBus",
)


def test_the_fields_terms_have_one_spelling() -> None:
    words = {word.lower(): word for word in _SPELLED}
    pattern = re.compile(rf"(?<![\w.:/@-])(?:{'|'.join(words)})(?![\w./@-])", re.IGNORECASE)
    found = [
        (path.relative_to(ROOT).as_posix(), word)
        for path in PAGES
        for paragraph in _paragraphs(path.read_text())
        for word in pattern.findall(paragraph)
        if words[word.lower()] != word
    ]
    assert found == []


def test_the_glossary_has_few_words_each_once() -> None:
    (block,) = re.findall(
        r"^```\{glossary\}\n(.*?)^```", GLOSSARY.read_text(), re.MULTILINE | re.DOTALL
    )
    entries = block.strip().split("\n\n")
    found = [re.fullmatch(r"(\w.*)\n    .*\n    Why: .*", entry) for entry in entries]
    assert [entry for entry, match in zip(entries, found, strict=True) if match is None] == []
    defined = [match[1] for match in found if match]
    assert 5 < len(defined) < 15
    assert sorted(defined) == sorted(set(defined))


def test_every_section_of_guarantees_and_guides_has_a_promise() -> None:
    told = {(page, heading) for page, heading, _, _ in promises()}
    written = {(page, heading) for page in pages() for heading in headings(page)}
    assert sorted(written - told) == [], "add these to tests/promises.toml"
    assert sorted(told - written) == [], "these are no headings any more"


def test_every_promise_is_held_by_tests_that_exist() -> None:
    known = cache(functions_of)
    for page, heading, promise, tests in promises():
        assert tests or not promise, (page, heading)
        for test in tests:
            module, name = test.split("::")
            assert name in known(module), test


MESSAGE_PAGES = ("docs/guides/trouble.md", "docs/reference/messages.md")


def test_every_message_is_found_by_its_words() -> None:
    """A page quotes the beginning of a fixed part of its text."""
    told = "".join((ROOT / page).read_text() for page in MESSAGE_PAGES)
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

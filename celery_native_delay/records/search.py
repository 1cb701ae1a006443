"""Parses and matches searches for waiting tasks: words, quoted texts and ``field:word``.

A task matches if all words match, case-insensitively. The fields are ``name``, ``queue``,
``key``, ``args``, ``kwargs``, ``id`` (the task id, also called ``uuid``), ``root`` (Celery's
``root_id``) and ``run`` (of Spark). ``kwargs:order=7`` matches if the keyword argument ``order`` is
exactly 7, and ``run:night`` if this is the whole name of the run.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ..errors import InvalidQuery

#: The attribute of :class:`~.waiting.Waiting` for each field of a search.
_FIELDS = {
    "name": "name",
    "queue": "queue",
    "key": "key",
    "uuid": "id",
    "id": "id",
    "root": "root_id",
    "run": "run",
    "args": "args",
    "kwargs": "kwargs",
}

_SEARCHED = ("id", "name", "args", "kwargs", "key", "queue", "root_id", "exchange", "routing_key")

#: A word of a search. It may contain quotes, and spaces between quotes.
_WORD = re.compile(r"""\s*((?:\\["\\]|"(?:\\["\\]|\\(?!["\\])|[^"\\])*"|\\(?!["\\])|[^\s"\\])+)""")
_QUOTED = re.compile(r'\\(["\\])|"')

#: The errors of ``ast.literal_eval``.
_UNREADABLE = (ValueError, TypeError, SyntaxError, MemoryError, RecursionError)


@dataclass(frozen=True)
class Word:
    """One word of a search. A task matches if the task's attribute *field* contains *value*.

    If *field* is "", any attribute may contain *value*. Upper and lower case are equal. If *field*
    is "kwargs", *value* may be ``name=value``: the keyword argument must have exactly this value.
    A "run" must have exactly this name: who cancels ``run:night`` does not mean ``nightly``.
    """

    field: str
    value: str

    def matches(self, task: Any) -> bool:
        wanted = self.value.lower()
        if not self.field:
            return any(wanted in getattr(task, name).lower() for name in _SEARCHED)
        if self._is_pair:
            key, _, value = wanted.partition("=")
            return (key.strip(), value.strip()) in _pairs(task.kwargs)
        found = getattr(task, self.field).lower()
        return wanted == found if self.field == "run" else wanted in found

    @property
    def needle(self) -> str:
        """A lower-case text that every matching task contains in lower or upper case."""
        if not self._is_pair:
            return self.value.lower()
        parts = [part.strip() for part in self.value.lower().split("=", 1)]
        return max((part for part in parts if "'" not in part), key=len, default="")  # Celery's \'

    @property
    def _is_pair(self) -> bool:
        return self.field == "kwargs" and "=" in self.value


def parse(text: str) -> tuple[Word, ...]:
    """Parse a search text into words. Raises InvalidQuery if the text is invalid."""
    words, at, end = [], 0, len(text.rstrip())
    while at < end:
        found = _WORD.match(text, at)
        if found is None:
            raise _error("every quote to be closed", text)
        words.append(_word(found[1], text))
        at = found.end()
    return tuple(words)


def is_itself_in_json(text: str) -> bool:
    """Return True if the JSON encoding of *text* needs no escapes."""
    return text.isascii() and json.dumps(text) == f'"{text}"'


def _word(token: str, text: str) -> Word:
    value = _QUOTED.sub(lambda found: found[1] or "", token)
    if value.startswith("-") and not token.startswith('"'):
        raise _error("words that a task contains, not words that it lacks (-)", text)
    field, colon, rest = value.partition(":")
    if not colon or field.lower() not in _FIELDS:
        field, rest = "", value
    if not rest:
        raise _error(f"a word behind the colon, or between the quotes, of {token!r}", text)
    return Word(_FIELDS.get(field.lower(), ""), rest)


def _pairs(kwargs: str) -> set[tuple[str, str]]:
    """Parse the repr of a task's keyword arguments into pairs of name and value."""
    try:
        found = ast.literal_eval(kwargs)
        pairs = found.items() if isinstance(found, dict) else ()
        return {(_text(key), _text(value)) for key, value in pairs}
    except _UNREADABLE:  # such as a datetime, a line break, or a text that Celery has cut
        return {_pair(*item.split(":", 1)) for item in _items(kwargs) if ":" in item}


def _items(kwargs: str) -> Iterator[str]:
    """Cut the repr of a dict at the commas between its items."""
    begin, depth, quote = 1, 0, ""
    for at, char in enumerate(kwargs):
        if quote:
            quote = "" if char == quote and kwargs[at - 1] != "\\" else quote
        elif char in "'\"":
            quote = char
        else:
            depth += (char in "([{") - (char in ")]}")
            if (char == "," and depth == 1) or not depth:
                yield kwargs[begin:at]
                begin = at + 1


def _pair(name: str, value: str) -> tuple[str, str]:
    try:
        return _text(ast.literal_eval(name.strip())), _text(ast.literal_eval(value.strip()))
    except _UNREADABLE:
        return name.strip(" '").lower(), value.strip(" '").lower()


def _text(value: object) -> str:
    return "" if value is None else str(value).lower()


def _error(expected: str, text: str) -> InvalidQuery:
    return InvalidQuery(f"expected {expected}, got {text!r}")

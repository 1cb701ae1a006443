"""Searches among the waiting tasks, in the words of Flower's search box. Pure.

A search is what Flower's search box takes (``flower.utils.search``), and means the same: words that
must all be there, in whatever case, wherever they stand; ``OR`` and parentheses; ``name:``,
``args:``, ``kwargs:key=value``, ``state:``, ``worker:``, ``result:`` (what waits is DELAYED, and
has neither of the last two). ``key:``, ``queue:``, ``uuid:``, ``root:`` are ours, and so are words
of one or two characters.
"""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from typing import Any

from ..errors import InvalidQuery

#: What a field is called in :class:`~.waiting.Waiting`.
_FIELDS = {
    "name": "name",
    "queue": "queue",
    "uuid": "id",
    "id": "id",
    "root": "root_id",
    "args": "args",
    "kwargs": "kwargs",
    "key": "key",
    "state": "state",
    "worker": "worker",
    "result": "result",
}

_SEARCHED = ("id", "name", "args", "kwargs", "key", "queue", "root_id", "exchange", "routing_key")

#: What waits has of fields that it does not keep.
_CONSTANTS = {"state": "delayed", "worker": "", "result": ""}


@dataclass(frozen=True)
class Word:
    """A text that *field* must contain, in whatever case; "" for any field.

    ``kwargs`` and a *value* with an equals sign are a keyword argument and its whole value.
    """

    field: str
    value: str

    def matches(self, task: Any) -> bool:
        wanted = self.value.lower()
        if not self.field:
            return any(wanted in getattr(task, name).lower() for name in _SEARCHED)
        if self.field in _CONSTANTS:
            return wanted == _CONSTANTS[self.field]
        if self._pair is not None:
            return self._pair in _pairs(task.kwargs)
        return wanted in getattr(task, self.field).lower()

    @property
    def needles(self) -> list[tuple[str, ...]]:
        if self.field in _CONSTANTS:
            return []
        if self._pair is None:
            return [(self.value.lower(),)]
        key, value = self._pair
        return [(text,) for text in (value, key) if text]

    @property
    def _pair(self) -> tuple[str, str] | None:
        if self.field != "kwargs" or "=" not in self.value:
            return None
        key, _, value = self.value.lower().partition("=")
        return key.strip(), value.strip()


@dataclass(frozen=True)
class AllOf:
    """Conditions that must all hold."""

    parts: tuple[Condition, ...]

    def matches(self, task: Any) -> bool:
        return all(part.matches(task) for part in self.parts)

    @property
    def needles(self) -> list[tuple[str, ...]]:
        return [group for part in self.parts for group in part.needles]


@dataclass(frozen=True)
class AnyOf:
    """Conditions of which one must hold."""

    parts: tuple[Condition, ...]

    def matches(self, task: Any) -> bool:
        return any(part.matches(task) for part in self.parts)

    @property
    def needles(self) -> list[tuple[str, ...]]:
        groups = [part.needles for part in self.parts]
        return [tuple(text for group in groups for text in group[0])] if all(groups) else []


Condition = Word | AllOf | AnyOf


def _pairs(kwargs: str) -> set[tuple[str, str]]:
    """Keyword arguments and their values, as Flower reads them from a repr."""
    try:
        found = ast.literal_eval(kwargs)
        pairs = found.items() if isinstance(found, dict) else ()
        return {(_text(key), _text(value)) for key, value in pairs}
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return set()


def _text(value: object) -> str:
    return "" if value is None else str(value).lower()


def parse(text: str) -> Condition | None:
    """The condition that a search asks for; None if it is empty. Raises as Query.parse()."""
    return _Parser(text).parse()


#: An operator, a parenthesis, or a word: quotes may stand anywhere in it, and hide what they hold.
_TOKEN = re.compile(
    r"""\s*([()]|(?:\\["\\]|"(?:\\["\\]|\\(?!["\\])|[^"\\])*"|\\(?!["\\])|[^\s()"\\])+)"""
)
_QUOTED = re.compile(r'\\(["\\])|"')

#: As many groups in groups as Flower takes.
_DEEPEST = 5


class _Parser:
    """A parser of one search; AND, which need not be written, binds more than OR."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._tokens: list[str] = []
        end = len(text.rstrip())
        at = 0
        while at < end:
            token = _TOKEN.match(text, at)
            if token is None:
                raise self._error("every quote to be closed")
            self._tokens.append(token[1])
            at = token.end()

    def parse(self) -> Condition | None:
        if not self._tokens:
            return None
        self._tokens.reverse()
        found = self._any_of(0)
        if self._tokens:
            raise self._error(f"a parenthesis to open before {self._tokens[-1]!r}")
        return found

    def _any_of(self, depth: int) -> Condition:
        parts = [self._all_of(depth)]
        while self._next_is("OR"):
            self._tokens.pop()
            parts.append(self._all_of(depth))
        return parts[0] if len(parts) == 1 else AnyOf(tuple(parts))

    def _all_of(self, depth: int) -> Condition:
        parts = [self._one(depth)]
        while self._tokens and not self._next_is("OR", ")"):
            if self._next_is("AND"):
                self._tokens.pop()
            parts.append(self._one(depth))
        return parts[0] if len(parts) == 1 else AllOf(tuple(parts))

    def _one(self, depth: int) -> Condition:
        if not self._tokens or self._next_is("AND", "OR", ")"):
            raise self._error("a word on both sides of AND and OR, and within parentheses")
        token = self._tokens.pop()
        if token != "(":
            return self._word(token)
        if depth == _DEEPEST:
            raise self._error(f"at most {_DEEPEST} groups in groups")
        found = self._any_of(depth + 1)
        if not self._next_is(")"):
            raise self._error("every parenthesis to be closed")
        self._tokens.pop()
        return found

    def _word(self, token: str) -> Word:
        value = _QUOTED.sub(lambda found: found[1] or "", token)
        if token == "NOT" or value.startswith("-"):
            raise self._error("words that are to be there, not what is not (NOT, -)")
        field, colon, rest = value.partition(":")
        field = field.lower()
        if not colon or field not in _FIELDS:
            field, rest = "", value
        if not rest:
            raise self._error(f"something behind the colon, or between the quotes, of {token!r}")
        return Word(_FIELDS.get(field, ""), rest)

    def _next_is(self, *tokens: str) -> bool:
        return bool(self._tokens) and self._tokens[-1] in tokens

    def _error(self, expected: str) -> InvalidQuery:
        return InvalidQuery(f"expected {expected}, got {self._text!r}")

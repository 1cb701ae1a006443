"""Encode a destination (exchange and routing key) into a delayed message's routing key.

The encoding is ``%<exchange>.<routing key>``, both for direct and for topic exchanges.
"""

from __future__ import annotations

from functools import lru_cache
from hashlib import sha256
from urllib.parse import unquote

#: AMQP 0-9-1 shortstr: routing keys and names are at most 255 bytes.
SHORTSTR_BYTES = 255

#: The most bytes of a word in a name. A longer word is hashed, so that the broker's error text can
#: hold the name (:func:`is_nameable`). The key is True for ASCII words.
_LONGEST_WORD_BYTES = {True: 100, False: 24}

#: The bytes of an error text, without the 125 bytes of the broker's longest text around the names.
NAMEABLE_BYTES = SHORTSTR_BYTES - 125

_ESCAPES = str.maketrans({"%": "%25", ".": "%2E", "*": "%2A", "#": "%23"})
_HASHED = "%h"
_WILDCARDS = {"*": "%2A", "#": "%23"}


@lru_cache(maxsize=1024)
def message_address(exchange: str, routing_key: str) -> str:
    """Encode a destination (exchange and routing key) as the last words of a routing key."""
    return _join(exchange, [_literal(word) for word in _words(routing_key)])


def topic_binding_address(exchange: str, pattern: str) -> str:
    """Encode the binding key of a topic exchange, keeping the wildcards ``*`` and ``#``."""
    words = [word if word in _WILDCARDS else _literal(word) for word in _words(pattern)]
    return _join(exchange, words)


def hashed_address(exchange: str, routing_key: str) -> str:
    """Return a short hash of a long exchange name and routing key."""
    return "%%h" + _digest(f"{exchange}\0{routing_key}")


def landing_address(exchange: str) -> str:
    return "%%l." + short_word(exchange)


def queue_address(queue: str) -> str:
    """Return the last words of a routing key that delivers a message only to *queue*."""
    return "%%q." + short_word(queue)


def queue_of_address(routing_key: str) -> str | None:
    """Decode the queue name in a routing key; return None for absent or hashed names."""
    _, mark, word = routing_key.rpartition(".%%q.")
    return unquote(word) if mark and not word.startswith(_HASHED) else None


def short_word(name: str) -> str:
    """Escape a name for one word of a routing key; hash a long name."""
    word = name.translate(_ESCAPES)
    fits = len(word.encode()) <= _LONGEST_WORD_BYTES[word.isascii()]
    return word if fits else _HASHED + _digest(name)


def is_nameable(*names: str) -> bool:
    """Return True if all *names* are ASCII, or if RabbitMQ's error texts have room for them."""
    # RabbitMQ cuts an error text at 255 bytes. If the text is not ASCII, RabbitMQ 4.3 closes the
    # connection (541), and RabbitMQ 3.10 may send half a character, which py-amqp cannot decode.
    text = "".join(names)
    return text.isascii() or len(text.encode()) <= NAMEABLE_BYTES


def _join(exchange: str, words: list[str]) -> str:
    return ".".join(["%" + exchange.translate(_ESCAPES), *words])


def _words(routing_key: str) -> list[str]:
    # rabbit_exchange_type_topic splits the empty key into no words, not one empty word.
    return routing_key.split(".") if routing_key else []


def _literal(word: str) -> str:
    return _WILDCARDS.get(word) or word.replace("%", "%25")


def _digest(text: str) -> str:
    return sha256(text.encode()).hexdigest()[:40]


def topic_matches(pattern: str, routing_key: str) -> bool:
    return _matches(pattern.split(".") if pattern else [], _words(routing_key))


def _matches(pattern: list[str], words: list[str]) -> bool:
    if not pattern:
        return not words
    head, rest = pattern[0], pattern[1:]
    if head == "#":
        return any(_matches(rest, words[start:]) for start in range(len(words) + 1))
    return bool(words) and head in ("*", words[0]) and _matches(rest, words[1:])

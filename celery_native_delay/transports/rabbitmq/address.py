"""Addresses: where a message goes when it is due, as the tail of its routing key.

An address is ``%<exchange>.<routing key>``, the exchange as one escaped word, the routing key
with as many words as the user gave it, so that a topic pattern still matches behind it.
The leading ``%`` keeps addresses apart from anything a user's own routing key holds; addresses of
our own begin with ``%%``, which no escaped exchange does.

Both ends compute it without asking: the publisher needs no knowledge of the exchange's type,
because a direct binding and a topic binding without wildcards have the same address.
"""

from __future__ import annotations

from functools import lru_cache
from hashlib import sha256
from urllib.parse import unquote

#: AMQP 0-9-1 shortstr: routing keys and names are at most 255 bytes.
SHORTSTR_BYTES = 255

#: The longest word of a derived name that is not hashed: in ASCII, and in other letters, whose
#: names the broker's refusals must hold whole (:func:`refusal_fits`).
_LONGEST_WORD_BYTES = {True: 100, False: 24}

#: The bytes of the broker's longest refusal without the names in it.
_REFUSAL_BYTES = 125

_ESCAPES = str.maketrans({"%": "%25", ".": "%2E", "*": "%2A", "#": "%23"})
_HASHED = "%h"
_WILDCARDS = {"*": "%2A", "#": "%23"}


@lru_cache(maxsize=1024)
def message_address(exchange: str, routing_key: str) -> str:
    """The address of a message published to *exchange* with *routing_key*."""
    return _join(exchange, [_literal(word) for word in _words(routing_key)])


def topic_binding_address(exchange: str, pattern: str) -> str:
    """The address pattern that stands for a topic binding of *pattern* to *exchange*."""
    words = [word if word in _WILDCARDS else _literal(word) for word in _words(pattern)]
    return _join(exchange, words)


def hashed_address(exchange: str, routing_key: str) -> str:
    """The fixed-length stand-in of an address that does not fit into a routing key."""
    return "%%h" + _digest(f"{exchange}\0{routing_key}")


def landing_address(exchange: str) -> str:
    """The address of the landing queue of *exchange*."""
    return "%%l." + short_word(exchange)


def queue_address(queue: str) -> str:
    """The address behind the landing queue of *queue*, which only that queue is bound with."""
    return "%%q." + short_word(queue)


def queue_of_address(routing_key: str) -> str | None:
    """The queue of a routing key that ends in a :func:`queue_address`.

    None for any other, and for a hashed one.
    """
    _, mark, word = routing_key.rpartition(".%%q.")
    return unquote(word) if mark and not word.startswith(_HASHED) else None


def short_word(name: str) -> str:
    """*name* as one escaped word, hashed when it is longer than 100 bytes, 24 if not ASCII."""
    word = name.translate(_ESCAPES)
    fits = len(word.encode()) <= _LONGEST_WORD_BYTES[word.isascii()]
    return word if fits else _HASHED + _digest(name)


def refusal_fits(*names: str) -> bool:
    """True if a refusal of the broker with all *names* in it arrives as a refusal.

    RabbitMQ cuts its text at 255 bytes. If the text is not ASCII, RabbitMQ 4.3 closes the
    connection instead (541), and 3.10 may cut a letter in two, which py-amqp cannot decode.
    """
    text = "".join(names)
    return text.isascii() or len(text.encode()) <= SHORTSTR_BYTES - _REFUSAL_BYTES


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
    """True if a topic exchange routes *routing_key* to a binding of *pattern*."""
    return _matches(pattern.split(".") if pattern else [], _words(routing_key))


def _matches(pattern: list[str], words: list[str]) -> bool:
    if not pattern:
        return not words
    head, rest = pattern[0], pattern[1:]
    if head == "#":
        return any(_matches(rest, words[start:]) for start in range(len(words) + 1))
    return bool(words) and head in ("*", words[0]) and _matches(rest, words[1:])

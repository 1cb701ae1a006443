"""The body of a message in bytes, wherever py-amqp holds it as text.

py-amqp reads an empty body as an empty text: sent again as it is, it would get an encoding that it
never had, or none that exists.
"""

from __future__ import annotations

import amqp

#: Encodings whose text has the one form in bytes, so that nothing is lost by decoding it.
_EXACT = frozenset((None, "utf-8", "UTF-8", "ascii", "us-ascii", "latin-1", "iso-8859-1"))


def received(message: amqp.Message) -> amqp.Message:
    """*message*, from a channel that decodes nothing, with a body that is bytes even when empty."""
    message.body = message.body or b""
    return message


def keep_bytes(message: amqp.Message) -> None:
    """Note down the bytes of a received body before py-amqp decodes it, where that loses some."""
    if message.properties.get("content_encoding") not in _EXACT:
        message.__dict__["bytes"] = message.body or b""


def as_it_came(message: amqp.Message) -> bytes:
    """The body of a received message in the bytes that came."""
    body = message.__dict__.get("bytes", message.body)
    if isinstance(body, str):
        body = body.encode(message.properties["content_encoding"]) if body else b""
    return bytes(body)

"""A text without a secret, however the secret is written in it."""

from __future__ import annotations

import re


def without(text: str, secret: str, stars: str = "***") -> str:
    """`text` with `stars` in place of `secret`: as it is, as `repr` writes it, percent-encoded whole or in part."""
    for written in (secret, repr(secret)[1:-1]):
        text = re.sub("".join(map(_either, written)), lambda _: stars, text)
    return text


def _either(character: str) -> str:
    """A pattern of the character as it is and as addresses may have it."""
    if character == " ":
        return "(?: |%20|[+])"
    if character.isascii() and character.isalnum():
        return character
    encoded = "".join(f"%{byte:02x}" for byte in character.encode(errors="surrogateescape"))
    return f"(?:{re.escape(character)}|(?i:{encoded}))"

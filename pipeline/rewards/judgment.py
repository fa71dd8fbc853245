"""What comes back for one sample, and how it is read: whatever the bytes are, reading them gives a Judgment or raises
BadMessageError, and costs no more than the limit on their number."""

from __future__ import annotations

import json
import math
import secrets
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from pipeline.rewards.channel import BadMessageError

MAX_TEXTS_BYTES = 64 * 2**20
"""Of one sample's texts and metadata."""
MAX_JUDGMENT_BYTES = 64 * 2**10
_MAX_DETAIL, _MAX_PARTS, _MAX_NAME = 500, 64, 200
_KEY_CHARACTERS = 32
MAX_REQUEST_BYTES = MAX_TEXTS_BYTES + _KEY_CHARACTERS

FAILURES = (
    *("timeout", "crashed", "raised", "non_finite", "bad_result", "too_large"),
    *("memory", "processes", "files"),
)
"""Why there is no score. memory, processes, files: above a limit of the sandbox."""


class Judgment(NamedTuple):
    """`failed` is one of FAILURES, with `detail` for the log, or None."""

    reward: float
    parts: dict[str, float]
    failed: str | None = None
    detail: str = ""


def failure(reason: str, detail: str) -> Judgment:
    """No score, and why."""
    return Judgment(0.0, {}, reason, detail)


def new_key() -> str:
    """The name of one request, which nobody could know before."""
    return secrets.token_hex(_KEY_CHARACTERS // 2)


def encode_request(key: str, texts: bytes) -> bytes:
    """The message that asks for one sample's score."""
    return key.encode() + texts


def encode_texts(prompt: str, response: str, answer: str, metadata: Mapping[str, Any] = MappingProxyType({})) -> bytes:
    """What there is to judge; lone surrogates too. `metadata` is plain data."""
    return json.dumps([prompt, response, answer, dict(metadata)]).encode()


def split_request(message: bytes) -> tuple[str, bytes]:
    """Its key, and the texts as they came."""
    return message[:_KEY_CHARACTERS].decode(), message[_KEY_CHARACTERS:]


def decode_texts(message: bytes) -> tuple[str, str, str, dict[str, Any]]:
    """Prompt, response, answer and metadata."""
    prompt, response, answer, metadata = json.loads(message)
    return prompt, response, answer, metadata


def encode_judgment(key: str, judgment: Judgment) -> bytes:
    """The message that answers the request `key`."""
    shortened = judgment._replace(detail=judgment.detail[:_MAX_DETAIL])
    return json.dumps([key, *shortened]).encode()


def decode_judgment(key: str, message: bytes) -> Judgment:
    """What answers the request `key`. Raises BadMessageError for anything else: another request's key, another shape,
    numbers that are not finite."""
    try:
        fields = json.loads(message)
    except (ValueError, RecursionError) as error:
        raise BadMessageError(f"no JSON ({type(error).__name__})") from None
    if not isinstance(fields, list) or len(fields) != 5:
        raise BadMessageError("no list of five")
    named, reward, parts, failed, detail = fields
    if named != key:
        raise BadMessageError("it does not answer what was asked")
    if not _is_number(reward) or not isinstance(parts, dict) or len(parts) > _MAX_PARTS:
        raise BadMessageError("reward or parts are none")
    if not all(len(name) <= _MAX_NAME and _is_number(part) for name, part in parts.items()):
        raise BadMessageError("a part is none")
    if not (failed is None or failed in FAILURES) or not isinstance(detail, str):
        raise BadMessageError("an unknown failure")
    numbers = {name: float(part) for name, part in parts.items()}
    return Judgment(float(reward), numbers, failed, detail[:_MAX_DETAIL])


def _is_number(value: Any) -> bool:
    """A finite one that fits a float."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return abs(value) < 1e300 if isinstance(value, int) else math.isfinite(value)

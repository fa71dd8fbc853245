"""The run's API key: from the environment, or from a file that only this user can read."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from pipeline.errors import RecipeError

API_KEY_VARIABLE = "EVENKEEL_API_KEY"
API_KEY_FILE_VARIABLE = "EVENKEEL_API_KEY_FILE"
_GROUP_OR_OTHERS, _OTHERS = 0o077, 0o007


def read_api_key(environment: Mapping[str, str] = os.environ) -> str | None:
    """The key, or None where there is none. Raises RecipeError when it is no key, or lies in a file that cannot be
    read, or that others can read."""
    if key := key_of_variable(API_KEY_VARIABLE, environment):
        return key
    if not (named := environment.get(API_KEY_FILE_VARIABLE)):
        return None
    path = Path(named)
    try:
        status, text = path.stat(), path.read_text("ascii", errors="replace")
    except OSError as error:
        raise RecipeError(f"{API_KEY_FILE_VARIABLE} names {path}, which cannot be read ({error}); correct it") from None
    mine = status.st_uid == os.geteuid()
    # A mounted Secret belongs to root, and to a group that the container is in.
    if status.st_uid not in (os.geteuid(), 0) or status.st_mode & (_GROUP_OR_OTHERS if mine else _OTHERS):
        raise RecipeError(
            f"{path} has mode {status.st_mode & 0o777:04o} and owner {status.st_uid}, expected 0600 or 0400 and this "
            f"user, since it holds the API key; chmod 600 {path}"
        )
    return _checked(text, str(path))


def key_of_variable(name: str, environment: Mapping[str, str] = os.environ) -> str | None:
    """The key that this variable holds, or None where it is empty or not set. Raises RecipeError when it is no key."""
    text = environment.get(name)
    return _checked(text, name) if text else None


def _checked(text: str, where: str) -> str:
    """The key without white space around it. Another character that no header may have makes an HTTP client refuse it
    and quote it. Raises RecipeError, which does not show it."""
    key = text.strip()
    if not key or " " in key or not (key.isascii() and key.isprintable()):
        raise RecipeError(f"{where} holds no API key, expected printable ASCII without blanks; write one there")
    return key

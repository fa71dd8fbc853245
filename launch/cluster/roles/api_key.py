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
    """The key, or None where there is none. Raises RecipeError when the file cannot be read, or others can read it."""
    if key := environment.get(API_KEY_VARIABLE):
        return key
    if not (named := environment.get(API_KEY_FILE_VARIABLE)):
        return None
    path = Path(named)
    try:
        status, key = path.stat(), path.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise RecipeError(f"{API_KEY_FILE_VARIABLE} names {path}, which cannot be read ({error}); correct it") from None
    mine = status.st_uid == os.geteuid()
    # A mounted Secret belongs to root, and to a group that the container is in.
    if status.st_uid not in (os.geteuid(), 0) or status.st_mode & (_GROUP_OR_OTHERS if mine else _OTHERS):
        raise RecipeError(
            f"{path} has mode {status.st_mode & 0o777:04o} and owner {status.st_uid}, expected 0600 or 0400 and this "
            f"user, since it holds the API key; chmod 600 {path}"
        )
    if not key or not key.isprintable() or " " in key:
        raise RecipeError(f"{path} holds no API key, expected one line of printable characters; write one there")
    return key

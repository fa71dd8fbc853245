"""Read API keys of the run and the teacher from the environment, or from a file that only this user can read."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from pipeline.errors import RecipeError

API_KEY_VARIABLE = "EVENKEEL_API_KEY"
API_KEY_FILE_VARIABLE = "EVENKEEL_API_KEY_FILE"
TEACHER_KEY_VARIABLE = "EVENKEEL_TEACHER_API_KEY"
"""Key of the servers in distillation.urls; without it, requests carry no key."""
TEACHER_KEY_FILE_VARIABLE = "EVENKEEL_TEACHER_API_KEY_FILE"
JOB_KEYS = "slurm-*.key"
"""Pattern of the key files of Slurm jobs, one file a job (launch.schedulers.slurm.batch)."""
_GROUP_OR_OTHERS, _OTHERS = 0o077, 0o007


def read_api_key(environment: Mapping[str, str] = os.environ, variable: str = API_KEY_VARIABLE) -> str | None:
    """Return the key from `variable` or its file, without white space around it; None if neither is set.

    Raises RecipeError for an invalid key, and for a file that cannot be read or that others can read. The error does
    not show the key. HTTP clients would quote a key with a character that no header may have.
    """
    text, where, file_variable = environment.get(variable), variable, f"{variable}_FILE"
    if not text:
        if not (named := environment.get(file_variable)):
            return None
        path = Path(named)
        try:
            status, text = path.stat(), path.read_text("ascii", errors="replace")
        except OSError as error:
            raise RecipeError(f"{file_variable} names {path}, which cannot be read ({error}); correct it") from None
        mine, where = status.st_uid == os.geteuid(), str(path)
        # A mounted Secret belongs to root, and to a group that the container is in.
        if status.st_uid not in (os.geteuid(), 0) or status.st_mode & (_GROUP_OR_OTHERS if mine else _OTHERS):
            raise RecipeError(
                f"{path} has mode {status.st_mode & 0o777:04o} and owner {status.st_uid}, expected 0600 or 0400 and "
                f"this user, since it holds a key; chmod 600 {path}"
            )
    key = text.strip()
    if not key or " " in key or not (key.isascii() and key.isprintable()):
        raise RecipeError(f"{where} holds no API key, expected printable ASCII without blanks; write one there")
    return key


def without_teacher_key(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment without the teacher's key, for roles that do not ask the teacher."""
    return {
        name: value
        for name, value in environment.items()
        if name not in (TEACHER_KEY_VARIABLE, TEACHER_KEY_FILE_VARIABLE)
    }

"""Folders for temporary files of one process, removed with all that they name, also after a kill.

A process that is killed removes nothing. So each folder's name says who made it, and whoever makes the next one removes
those whose makers are gone.
"""

from __future__ import annotations

import getpass
import os
import re
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

_NAME = re.compile(r"evenkeel-(?:[a-z]+)-(\d+)-\w+")
_SHARED = Path("/dev/shm")
_LENT = re.compile(r"torch_\d+_\d+_\d+")
"""As torch names its files of shared memory."""


def make_scratch(kind: str) -> Path:
    """A new folder of this process; `kind` is for people, in small letters."""
    remove_left_scratch()
    return Path(tempfile.mkdtemp(prefix=f"evenkeel-{kind}-{os.getpid()}-"))


def remove_left_scratch() -> None:
    """Remove the folders on this machine whose makers are gone."""
    for left in Path(tempfile.gettempdir()).glob("evenkeel-*"):
        match = _NAME.fullmatch(left.name)
        if match and not _is_alive(int(match[1])):
            remove_scratch(left)


def remove_scratch(folder: Path) -> None:
    """Remove it. Files of shared memory that are named after files in it go, too: SGLang names its own so, and a
    learner leaves the name of what it lends to engines (megatron_bridge.weight_sync.shared_buffer)."""
    with suppress(OSError):
        if folder.stat().st_uid != os.getuid():
            return
        for name in os.listdir(folder):
            lent = [_SHARED / name] if _LENT.fullmatch(name) else []
            for shared in (*_SHARED.glob(f"sglang_loads_{name}_*.shm"), *lent):
                shared.unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)


def scratch_environment(folder: Path) -> dict[str, str]:
    """With which a program puts its temporary files there. What torch has compiled stays where it was: it is used
    again."""
    caches = os.environ.get("TORCHINDUCTOR_CACHE_DIR") or f"{tempfile.gettempdir()}/torchinductor_{getpass.getuser()}"
    return {"TMPDIR": str(folder), "TORCHINDUCTOR_CACHE_DIR": caches}


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True

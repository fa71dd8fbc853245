"""Count the starts of each role, of which only the newest may write to the run.

    RUN/epochs/collector/000003   created exclusively by the third start of the collector; it names the process
    RUN/epochs/collector/NEWEST   the same number, replaced atomically

A process that was frozen or cut off from the network still believes that it is the collector. A lock does not help,
since its holder cannot know that it lost it. So every start of a role takes the next number, compares its number with
the newest before every visible effect, and ends when it is superseded.

A comparison can be too late by an instant. So what must not happen twice is also created exclusively (batches), moved
to a name that must be free (checkpoints, policies), or refused by the engine (weights).
"""

from __future__ import annotations

import json
import os
import re
import socket
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Literal, get_args

from pipeline.data.checksums import create_sealed, read_sealed_json, reason, unseal, write_sealed
from pipeline.data.files import NUMBER, asked_again, make_folder, read_at_most
from pipeline.errors import DeadlineExceededError, StoreError, SupersededError

Role = Literal["learner", "collector", "engine", "router", "supervisor"]
ROLES: tuple[Role, ...] = get_args(Role)
_NUMBER = re.compile(rf"(?:{NUMBER})")
_NEWEST = "NEWEST"
_POINTER_BYTES = 1000


@dataclass(frozen=True)
class Epoch:
    """A start of a role, or of one of several engines."""

    folder: Path
    """RUN/epochs/NAME; NAME is a role, or a role and an index: `engine-3`."""
    number: int

    name: str = field(init=False)
    """The role and start, such as `collector-000003`. It names files that only this process writes."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "name", f"{self.folder.name}-{self.number:06d}")

    def is_superseded(self) -> bool:
        return newest(self.folder) > self.number

    def check(self) -> None:
        """Raise SupersededError once there is a later start. Call this before every visible effect."""
        later = newest(self.folder)
        if later > self.number:
            raise SupersededError(
                f"this {self.folder.name} is start {self.number}, and start {later} has taken over "
                f"({who(self.folder, later)}); this one ends"
            )

    @contextmanager
    def as_superseded(self) -> Iterator[None]:
        """Raise SupersededError for any error in the block once there is a later start, which removes this start's
        files: with another exit status, this start would be restarted, or end the run."""
        try:
            yield
        except Exception:
            self.check()
            raise


def claim(run: Path, role: Role, index: int | None = None, *, recipe: str = "") -> Epoch:
    """Begin the next epoch of a role, superseding the one before. `recipe` names this start's recipe file."""
    folder = epoch_folder(run, role, index)
    make_folder(folder)
    while True:
        number = newest(folder) + 1
        if _begin(folder, number, recipe):
            return Epoch(folder, number)


def supersede(folder: Path, accepted: Collection[str] = ()) -> None:
    """Begin an epoch without a holder, unless the newest start, even after a race, has an `accepted` recipe."""
    while (number := newest(folder)) and _recipe_of(folder, number) not in accepted:
        if _begin(folder, number + 1, ""):
            return


def _begin(folder: Path, number: int, recipe: str) -> bool:
    """Begin an epoch, and return whether it was free."""
    by = dict(host=socket.gethostname(), pid=os.getpid(), time=time.time())
    try:
        create_sealed(folder / f"{number:06d}", json.dumps(by | (dict(recipe=recipe) if recipe else {})) + "\n")
    except FileExistsError:
        return False
    while _pointer(folder) < (latest := newest(folder)):  # again: another start may have written in between
        write_sealed(folder / _NEWEST, f"{latest:06d}\n")
    return True


def epoch_folder(run: Path, role: Role, index: int | None = None) -> Path:
    """Return the folder that counts the starts of a role."""
    return run / "epochs" / (role if index is None else f"{role}-{index}")


def newest(folder: Path) -> int:
    """Return the newest epoch, or 0, from both the listing and the pointer, since file systems cache either. Raises
    OSError where the folder cannot be listed for a while."""
    with suppress(FileNotFoundError):
        listed = filter(_NUMBER.fullmatch, asked_again(partial(os.listdir, folder)))
        return max(_pointer(folder), *map(int, listed), 0)
    return 0


def first_start_after(folder: Path, moment: float, longest_pause_s: float) -> float | None:
    """Return the time, in seconds since 1970, of the first start after `moment` in the latest series with pauses up to
    `longest_pause_s`; None without a readable one."""
    began: float | None = None
    for number in range(newest(folder), 0, -1):
        try:
            at = float(read_sealed_json(folder / f"{number:06d}", "it is only shown")["time"])
        except (OSError, StoreError, KeyError, TypeError, ValueError):
            continue
        if at <= moment or (began is not None and began - at > longest_pause_s):
            break
        began = at if began is None else min(began, at)
    return began


def who(folder: Path, number: int) -> str:
    """Return the process that claimed an epoch, for messages."""
    try:
        claimed = read_sealed_json(folder / f"{number:06d}", "it is only shown")
        return f"host {claimed['host']}, process {claimed['pid']}"
    except (OSError, StoreError, KeyError):
        return "by an unknown process"


def _recipe_of(folder: Path, number: int) -> str | None:
    """Return the name of a start's recipe file, or None if unknown."""
    try:
        found = read_sealed_json(folder / f"{number:06d}", "its role is started again")
    except (FileNotFoundError, StoreError):
        return None
    return found.get("recipe") if isinstance(found, dict) else None


def _pointer(folder: Path) -> int:
    pointer, cause = folder / _NEWEST, None
    try:
        data = asked_again(partial(read_at_most, pointer, _POINTER_BYTES), is_whole=bool)
        if data:
            return int(unseal(data))
        trouble = "it is empty"
    except FileNotFoundError:
        return 0
    except OSError as error:
        trouble, cause = str(error), error
    except ValueError as error:
        raise StoreError(f"{pointer} is damaged ({reason(error)}); remove it: starts are counted without it") from error
    raise DeadlineExceededError(
        f"{pointer} cannot be read ({trouble}); it is read again at the next start; remove it if it stays so"
    ) from cause

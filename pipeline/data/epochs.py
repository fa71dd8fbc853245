"""Epochs: which start of a role may write to the run.

    RUN/epochs/collector/000003   made at the third start of the collector, by exclusive creation; it says by whom
    RUN/epochs/collector/NEWEST   the same number, replaced atomically

A process that was frozen, or cut off from the network, goes on believing that it is the collector. No lock helps: its
holder cannot know that it lost it. So every start of a role takes the next number, and a process compares its number
with the newest one before everything that others could see. It ends when it was superseded.

A comparison can be too late by an instant, so what must not happen twice is also created exclusively (batches), moved
onto a name that must be free (checkpoints, policies), or refused by the engine that it is meant for (weights).
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
    """One start of a role, or of one of several engines. `check` raises once there is a later one."""

    folder: Path
    """RUN/epochs/NAME; NAME is a role, or a role and an index: `engine-3`."""
    number: int

    name: str = field(init=False)
    """Of role and start: `collector-000003`. Names files that one process alone writes."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "name", f"{self.folder.name}-{self.number:06d}")

    def is_superseded(self) -> bool:
        """Return whether there is a later start."""
        return newest(self.folder) > self.number

    def check(self) -> None:
        """Call it before everything that others could see. Raises SupersededError."""
        later = newest(self.folder)
        if later > self.number:
            raise SupersededError(
                f"this {self.folder.name} is start {self.number}, and start {later} has taken over "
                f"({who(self.folder, later)}); this one ends"
            )

    @contextmanager
    def as_superseded(self) -> Iterator[None]:
        """Raise SupersededError for whatever goes wrong in the block once there is a later start.

        That one removes files over which this one was frozen. With another exit status this one would be started
        again, and take over in turn from one that does well; or it would end the run, by an error that is fatal.
        """
        try:
            yield
        except Exception:
            self.check()
            raise


def claim(run: Path, role: Role, index: int | None = None, *, recipe: str = "") -> Epoch:
    """Begin the next epoch of a role: whoever held the one before is superseded from now on. `recipe` is the name of
    the file of the recipe that this start goes by (`supersede`)."""
    folder = epoch_folder(run, role, index)
    make_folder(folder)
    while True:
        number = newest(folder) + 1
        if _begin(folder, number, recipe):
            return Epoch(folder, number)


def supersede(folder: Path, accepted: Collection[str] = ()) -> None:
    """Begin an epoch that nobody holds, unless the newest start goes by a recipe whose file has one of the `accepted`
    names. A start that begins meanwhile is looked at, too."""
    while (number := newest(folder)) and _recipe_of(folder, number) not in accepted:
        if _begin(folder, number + 1, ""):
            return


def _begin(folder: Path, number: int, recipe: str) -> bool:
    """Return whether the epoch was free, and is begun now."""
    by = dict(host=socket.gethostname(), pid=os.getpid(), time=time.time())
    try:
        create_sealed(folder / f"{number:06d}", json.dumps(by | (dict(recipe=recipe) if recipe else {})) + "\n")
    except FileExistsError:
        return False
    while _pointer(folder) < (latest := newest(folder)):  # once more: another start may have written its own between
        write_sealed(folder / _NEWEST, f"{latest:06d}\n")
    return True


def epoch_folder(run: Path, role: Role, index: int | None = None) -> Path:
    """Return where the starts of a role are counted."""
    return run / "epochs" / (role if index is None else f"{role}-{index}")


def newest(folder: Path) -> int:
    """Return the newest epoch; 0 when the role never started. Raises OSError where the folder cannot be listed for a
    while.

    Both the listing and the pointer are read: file systems that cache, cache the one or the other.
    """
    with suppress(FileNotFoundError):
        listed = (int(name) for name in asked_again(lambda: os.listdir(folder)) if _NUMBER.fullmatch(name))
        return max(_pointer(folder), *listed, 0)
    return 0


def first_start_after(folder: Path, moment: float, longest_pause_s: float) -> float | None:
    """Return when the earliest of the starts after a moment began that followed one another within `longest_pause_s`,
    in seconds since 1970; None without one, or where those that there are cannot be read."""
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
    """Return the name of the file of the recipe that a start goes by; None where it has not said."""
    try:
        found = read_sealed_json(folder / f"{number:06d}", "its role is started again")
    except (FileNotFoundError, StoreError):
        return None
    return found.get("recipe") if isinstance(found, dict) else None


def _pointer(folder: Path) -> int:
    pointer, cause = folder / _NEWEST, None
    try:
        data = asked_again(lambda: read_at_most(pointer, _POINTER_BYTES), is_whole=bool)
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

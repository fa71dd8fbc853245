"""Carry out a plan: what is damaged is set aside, never deleted, and what was done is recorded.

    RUN/damaged/000001/batches/000012.zarr.zip   what the first repair set aside
    RUN/repairs/000001.json                      what it did: made last, exclusively

Killed at any point, it can be done again: what is set aside already is found to be missing.
"""

from __future__ import annotations

import json
import os
import re
import socket
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from pipeline.data.checksums import create_sealed, read_sealed_json, write_sealed
from pipeline.data.files import NUMBER, fsync_directory, make_folder, write_atomically
from pipeline.data.run_directory import RunDirectory, numbered
from pipeline.repair.plan import Plan, Repair

_RECORD = re.compile(rf"({NUMBER})\.json")


def stamp() -> str:
    """When, UTC, and by which process."""
    when = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
    return f"{when} by process {os.getpid()} on {socket.gethostname()}"


def apply(run: RunDirectory, plan: Plan) -> Path:
    """Returns the folder of what is set aside. Raises OSError, and FileExistsError when another repair is under way."""
    number = _next_number(run)
    for repair in plan.repairs:
        _carry_out(run, repair)
    done = [
        dict(path=str(one.path.relative_to(run.path)), problem=one.problem, becomes=one.becomes) for one in plan.repairs
    ]
    make_folder(run.path / "repairs")
    record = json.dumps(dict(recorded=stamp(), repairs=done)) + "\n"
    create_sealed(run.path / "repairs" / f"{numbered(number)}.json", record)
    return _folder(run, number)


def set_aside(run: RunDirectory, paths: Iterable[Path]) -> None:
    """Move files and folders to where the next repair puts them; those that are missing are left out."""
    folder = _folder(run, _next_number(run))
    for path in filter(os.path.lexists, paths):
        target = folder / path.relative_to(run.path)
        while os.path.lexists(target):  # of a repair that was killed
            target = target.with_name(f"{target.name}.again")
        make_folder(target.parent)
        path.rename(target)
        fsync_directory(target.parent)
        fsync_directory(path.parent)


def repaired_paths(run: RunDirectory) -> set[str]:
    """Every path, relative to the run, that a repair has set aside or written anew. Raises StoreError."""
    records = (run.path / "repairs" / f"{numbered(number)}.json" for number in _numbers(run))
    read = (read_sealed_json(path, "remove it: it only records what was repaired") for path in records)
    return {str(one["path"]) for record in read for one in record["repairs"]}


def _carry_out(run: RunDirectory, repair: Repair) -> None:
    if repair.set_aside:
        set_aside(run, [repair.path])
    if repair.lost is not None:
        with suppress(FileExistsError):
            repair.lost.write(run.batches / f"{numbered(repair.lost.index)}.lost.json")
    if repair.text is not None:
        make_folder(repair.path.parent)
        write = write_atomically if repair.path.suffix == ".jsonl" else write_sealed  # its lines have their checksums
        write(repair.path, repair.text)


def _folder(run: RunDirectory, number: int) -> Path:
    return run.path / "damaged" / numbered(number)


def _next_number(run: RunDirectory) -> int:
    return max(_numbers(run), default=0) + 1


def _numbers(run: RunDirectory) -> list[int]:
    folder = run.path / "repairs"
    names = os.listdir(folder) if folder.is_dir() else []
    return sorted(int(match[1]) for name in names if (match := _RECORD.fullmatch(name)))

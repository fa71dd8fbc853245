"""What one look of a process costs the shared file system: counted while the product's own functions run.

Opened files, listed folders, names that were looked up, renamed, linked or removed, and fsyncs. A file server sees an
open as two requests (open and close) and a listing as two (open and read); what it reads is not counted.
"""

from __future__ import annotations

import os
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

from pipeline.data.epochs import claim
from pipeline.data.files import await_visible, create_exclusively, write_atomically
from pipeline.data.membership import Member
from pipeline.data.run_directory import RunDirectory
from pipeline.data.store import BatchStore

REQUESTS = {
    "open": 2,
    "os.listdir": 2,
    "os.scandir": 2,
    "os.rename": 1,
    "os.link": 1,
    "os.remove": 1,
    "os.mkdir": 1,
    "stat": 1,
    "fsync": 1,
}
"""Requests to a file server, by what Python calls."""
FEW, MANY = 4, 12
_counting: list[int] = []
"""Holds one number while an action is counted."""
_COUNTED_THREAD = threading.get_ident()
"""Others of this process may be at work, too."""


def _hook(event: str, arguments: tuple[object, ...]) -> None:
    # Python opens folders, to make them durable, by number; only names are of the shared file system.
    if threading.get_ident() != _COUNTED_THREAD:
        return
    if _counting and event in REQUESTS and not (event == "open" and isinstance(arguments[0], int)):
        _counting[0] += REQUESTS[event]


sys.addaudithook(_hook)


def requests_of(action: Callable[[], object]) -> int:
    """Requests of one action."""
    real_stat, real_fsync = os.stat, os.fsync

    def stat(*arguments: Any, **options: Any) -> os.stat_result:
        _hook("stat", ())
        return real_stat(*arguments, **options)

    def fsync(descriptor: int) -> None:
        _hook("fsync", ())
        real_fsync(descriptor)

    with patch.object(os, "stat", stat), patch.object(os, "fsync", fsync):
        _counting.append(0)
        try:
            action()
        finally:
            found = _counting.pop()
    return found


def measured() -> dict[str, float]:
    """Requests of each action of a run; `… each` for one more engine."""
    with tempfile.TemporaryDirectory() as folder:
        run = RunDirectory(Path(folder) / "run")
        run.make_folders()
        run.set_published(0)
        epoch = claim(run.path, "engine", 0)
        store, batch = BatchStore(run.batches), run.batches / "000000.zarr.zip"
        batch.write_bytes(b"batch")
        few, many = (_list_engines(run, count) for count in (FEW, MANY))
        each = (many - few) / (MANY - FEW)
        return {
            "epoch check": requests_of(epoch.check),
            "finished?": requests_of(run.is_finished),
            "published?": requests_of(run.published_version),
            "batch there?": requests_of(lambda: store.exists(1)),
            "batch opened": requests_of(lambda: (await_visible(batch), batch.is_file(), batch.read_bytes())),
            "engines listed": few - FEW * each,
            "engines listed, each": each,
            "file replaced": requests_of(lambda: write_atomically(run.path / "file", "x")),
            "file created": requests_of(lambda: create_exclusively(run.path / "other", "x")),
        }


def _list_engines(run: RunDirectory, count: int) -> int:
    membership = run.membership()
    for index in range(count):
        membership.announce(Member(index, f"http://10.0.0.{index}:30000", 1))
    return requests_of(membership.engines)

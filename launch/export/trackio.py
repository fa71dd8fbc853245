"""Trackio: its local database, which `trackio show` opens. Nothing here opens a connection.

    FOLDER/evenkeel.db        one project; a folder that several runs are exported to has them side by side

A point is one row, and a row is one transaction: it is there whole or not at all.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

from launch.export.destination import Config
from launch.export.points import STEP, VERSION, Key, Point
from pipeline.data.files import make_folder

if TYPE_CHECKING:
    from trackio.sqlite_storage import SQLiteStorage

PROJECT = "evenkeel"


class TrackioDatabase:
    """A launch.export.destination.Destination."""

    def __init__(self, folder: Path, name: str, run_id: str, config: Config) -> None:
        """`run_id` stays the same for all exports of a run."""
        self._folder, self._name, self._id, self._config = folder, name, run_id, config
        self._storage = _storage_in(folder)

    def held(self) -> Mapping[Key, float]:
        rows = self._storage.get_logs(PROJECT, self._name, run_id=self._id)
        return {
            Key(VERSION if any(name.startswith("evaluation/") for name in row) else STEP, row["step"]): (
                datetime.fromisoformat(row["timestamp"]).timestamp()
            )
            for row in rows
        }

    def clear(self) -> None:
        self._storage.delete_run(PROJECT, self._name, run_id=self._id)

    def write(self, point: Point) -> None:
        self._storage.bulk_log(
            PROJECT,
            self._name,
            [dict(point.values)],
            steps=[point.key.number],
            timestamps=[datetime.fromtimestamp(point.time, UTC).isoformat()],
            config=dict(self._config),
            run_id=self._id,
        )

    def flush(self) -> None:
        """Each row is committed as it is written."""

    def said(self) -> str:
        return f"look at it with: TRACKIO_DIR={self._folder} trackio show --project {PROJECT}"

    def __enter__(self) -> Self:
        make_folder(self._folder)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass


def _storage_in(folder: Path) -> type[SQLiteStorage]:
    """Trackio's storage. It asks for its folder when it is imported, and keeps to it."""
    os.environ["TRACKIO_DIR"] = str(folder)
    from trackio import sqlite_storage

    sqlite_storage.TRACKIO_DIR = folder
    storage: type[SQLiteStorage] = sqlite_storage.SQLiteStorage
    return storage

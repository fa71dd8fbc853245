"""Trackio: its local database, which `trackio show` opens. Nothing here opens a connection.

    FOLDER/evenkeel.db        one project; a folder that several runs are exported to has them side by side

A point is one row, and a row is one transaction: it is there whole or not at all.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from launch.export.destination import Config, NamedDestination
from launch.export.points import STEP, VERSION, Key, Point

if TYPE_CHECKING:
    from trackio.sqlite_storage import SQLiteStorage

PROJECT = "evenkeel"


class TrackioDatabase(NamedDestination):
    def __init__(self, folder: Path, name: str, run_id: str, config: Config) -> None:
        super().__init__(folder, name, run_id, config)
        self._storage = _storage_in(folder)
        self._untold: Config | None = config
        """The recipe, until a point has taken it along."""

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
        self._untold = self._config

    def write(self, point: Point) -> None:
        self._storage.bulk_log(
            PROJECT,
            self._name,
            [dict(point.values)],
            steps=[point.key.number],
            timestamps=[datetime.fromtimestamp(point.time, UTC).isoformat()],
            config=None if self._untold is None else dict(self._untold),
            run_id=self._id,
        )
        self._untold = None

    def flush(self) -> None:
        """Each row is committed as it is written."""

    def said(self) -> str:
        return f"look at it with: TRACKIO_DIR={self._folder} trackio show --project {PROJECT}"


def _storage_in(folder: Path) -> type[SQLiteStorage]:
    """Trackio's storage. It asks for its folder when it is imported, and keeps to it."""
    os.environ["TRACKIO_DIR"] = str(folder)
    from trackio import sqlite_storage

    sqlite_storage.TRACKIO_DIR = folder
    storage: type[SQLiteStorage] = sqlite_storage.SQLiteStorage
    return storage

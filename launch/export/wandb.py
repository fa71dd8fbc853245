"""Weights & Biases, offline: a run folder that `wandb sync` uploads. Nothing here opens a connection.

    FOLDER/wandb/offline-run-20260101_120000-NAME-1a2b3c4d/run-NAME-1a2b3c4d.wandb

Its library cannot go on with an offline folder. So each start of the exporter writes all points anew, into one folder,
under the same id. W&B's own step counts rows; charts go by `step`, and for evaluations by `version`.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path

os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # it would report its errors to its makers
os.environ.pop("WANDB_SERVICE", None)  # a parent's: what is killed here would go on there

import wandb

from launch.export.destination import Config, NamedDestination
from launch.export.points import STEP, VERSION, Key, Point

PROJECT = "evenkeel"


class WandbFolder(NamedDestination):
    def __init__(self, folder: Path, name: str, run_id: str, config: Config) -> None:
        super().__init__(folder, name, run_id, config)
        self._run: wandb.Run | None = None
        self._defined: set[str] = set()
        """Names of which the run in progress knows the x axis."""

    def held(self) -> Mapping[Key, float]:
        self.clear()
        return {}

    def clear(self) -> None:
        self.close()
        for path in self._folders():
            shutil.rmtree(path)

    def write(self, point: Point) -> None:
        if self._run is None:
            self._run = self._begun()
        self._define(self._run, point)
        row = {point.key.kind: point.key.number, "_timestamp": point.time, **point.values}
        self._run.log(row, commit=True)

    def flush(self) -> None:
        """W&B's process alone decides: it keeps back up to 32 KB until the exporter ends."""

    def said(self) -> str:
        [path] = self._folders() or [self._folder]
        return f"upload it with: wandb sync {path}"

    def close(self) -> None:
        if self._run is not None:
            self._run.finish()
            self._run = None
            wandb.teardown()  # its process is awaited: the last rows may not be in the file before it has ended

    def _folders(self) -> list[Path]:
        return sorted((self._folder / "wandb").glob(f"offline-run-*-{self._id}"))

    def _begun(self) -> wandb.Run:
        machine_is_nobodys_business = dict(
            x_disable_meta=True,
            x_disable_stats=True,
            x_disable_machine_info=True,
            x_save_requirements=False,
            disable_git=True,
            disable_code=True,
        )
        settings = wandb.Settings(
            mode="offline",
            run_id=self._id,
            root_dir=str(self._folder),
            console="off",
            silent=True,
            **machine_is_nobodys_business,
        )
        run = wandb.init(project=PROJECT, name=self._name, config=dict(self._config), settings=settings)
        self._defined = {STEP, VERSION}
        for name in self._defined:
            run.define_metric(name)
        return run

    def _define(self, run: wandb.Run, point: Point) -> None:
        """Say what the x axis of each number is. One by one: of two patterns that fit, W&B takes either. Without
        `step_sync`: it would write the last step into the rows of evaluations, which are of none."""
        for name in point.values.keys() - self._defined:
            run.define_metric(name, step_metric=point.key.kind, step_sync=False)
            self._defined.add(name)

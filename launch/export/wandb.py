"""Write an offline run of Weights & Biases: a folder that `wandb sync` uploads. Nothing here opens a connection.

    FOLDER/wandb/offline-run-20260101_120000-NAME-1a2b3c4d/run-NAME-1a2b3c4d.wandb

Every start of the exporter writes one folder under the same id, since the library cannot continue an offline folder.
W&B's step counts rows; charts go by `step`, and those of evaluations by `version`.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # it would report its errors to its makers
os.environ.pop("WANDB_SERVICE", None)  # a parent's service would outlive this process

import wandb

if TYPE_CHECKING:
    from launch.export.export import Point

PROJECT = "evenkeel"


class WandbFolder:
    """The offline folder of one run in an existing folder, from one exporter at a time."""

    def __init__(self, folder: Path, name: str, run_id: str, config: Mapping[str, Any]) -> None:
        self.hint = f"upload it with: wandb sync {folder}/wandb/offline-run-*-{run_id}"
        self._folder, self._name, self._id, self._config = folder, name, run_id, config
        self._run: wandb.Run | None = None
        self._defined: set[str] = set()
        """Names whose x axis the run in progress knows."""

    def clear(self) -> None:
        self.close()
        for path in (self._folder / "wandb").glob(f"offline-run-*-{self._id}"):
            shutil.rmtree(path)

    def write(self, point: Point) -> None:
        if self._run is None:
            self._run = self._begin()
        for name in point.values.keys() - self._defined:
            # One by one, since W&B takes either of two patterns that fit. step_sync would write the last step into the
            # rows of evaluations, which have none.
            self._run.define_metric(name, step_metric=point.key.kind, step_sync=False)
            self._defined.add(name)
        self._run.log({point.key.kind: point.key.number, "_timestamp": point.time, **point.values}, commit=True)

    def flush(self) -> None:
        """Do nothing: W&B's process decides when to write, and keeps back up to 32 KB until the exporter ends."""

    def close(self) -> None:
        if self._run is not None:
            self._run.finish()
            self._run = None
            wandb.teardown()  # waits for W&B's process: before it has ended, the file may lack the last rows

    def _begin(self) -> wandb.Run:
        settings = wandb.Settings(
            mode="offline",
            run_id=self._id,
            root_dir=str(self._folder),
            console="off",
            silent=True,
            # Record nothing about the machine.
            x_disable_meta=True,
            x_disable_stats=True,
            x_disable_machine_info=True,
            x_save_requirements=False,
            disable_git=True,
            disable_code=True,
        )
        run = wandb.init(project=PROJECT, name=self._name, config=dict(self._config), settings=settings)
        self._defined = {"step", "version"}
        for name in self._defined:
            run.define_metric(name)
        return run

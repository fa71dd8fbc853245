"""Weights & Biases, offline: a run folder that `wandb sync` uploads. Nothing here opens a connection.

    FOLDER/wandb/offline-run-20260101_120000-NAME-1a2b3c4d/run-NAME-1a2b3c4d.wandb

Every start of the exporter writes one folder under the same id: the library cannot go on with an offline folder. W&B's
own step counts rows; charts go by `step`, and for evaluations by `version`.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # it would report its errors to its makers
os.environ.pop("WANDB_SERVICE", None)  # a parent's: what is killed here would go on there

import wandb

if TYPE_CHECKING:
    from launch.export.export import Point

PROJECT = "evenkeel"


class WandbFolder:
    """The offline folder of one run, from one exporter at a time."""

    def __init__(self, folder: Path, name: str, run_id: str, config: Mapping[str, Any]) -> None:
        """`folder` is there; `config` is a resolved recipe, as plain data."""
        self.hint = f"upload it with: wandb sync {folder}/wandb/offline-run-*-{run_id}"
        self._folder, self._name, self._id, self._config = folder, name, run_id, config
        self._run: wandb.Run | None = None
        self._defined: set[str] = set()
        """Names of which the run in progress knows the x axis."""

    def clear(self) -> None:
        self.close()
        for path in (self._folder / "wandb").glob(f"offline-run-*-{self._id}"):
            shutil.rmtree(path)

    def write(self, point: Point) -> None:
        if self._run is None:
            self._run = self._begin()
        for name in point.values.keys() - self._defined:
            # One by one: of two patterns that fit, W&B takes either. Without step_sync: it would write the last step
            # into the rows of evaluations, which are of none.
            self._run.define_metric(name, step_metric=point.key.kind, step_sync=False)
            self._defined.add(name)
        self._run.log({point.key.kind: point.key.number, "_timestamp": point.time, **point.values}, commit=True)

    def flush(self) -> None:
        """Do nothing: W&B's process alone decides, and keeps back up to 32 KB until the exporter ends."""

    def close(self) -> None:
        if self._run is not None:
            self._run.finish()
            self._run = None
            wandb.teardown()  # its process is awaited: the last rows may not be in the file before it has ended

    def _begin(self) -> wandb.Run:
        settings = wandb.Settings(
            mode="offline",
            run_id=self._id,
            root_dir=str(self._folder),
            console="off",
            silent=True,
            # The machine is nobody's business.
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

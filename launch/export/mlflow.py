"""MLflow: a SQLite database, which `mlflow ui` opens. Nothing here opens a connection.

    FOLDER/mlflow.db        one experiment; a folder that several runs are exported to has them side by side

A point ends by a number `step` or `version` of its own: points without it were torn by a kill, and are written again,
which MLflow takes as one.
"""

from __future__ import annotations

import fcntl
import logging
import os
from collections.abc import Mapping
from pathlib import Path

os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")  # it would tell its makers what is called

from mlflow.entities import Metric, Param, Run
from mlflow.tracking import MlflowClient

from launch.export.destination import Config, NamedDestination
from launch.export.mlflow_names import mlflow_name
from launch.export.points import STEP, VERSION, Key, Point
from pipeline.data.files import fsync_directory, remove_leftovers_of, temporary_name

EXPERIMENT = "evenkeel"
_OF_RUN = "evenkeel.run"
"""Tag of a run that says of which run directory it is."""
_MOST_A_CALL = 1000
_LONGEST_VALUE = 6000


class MLflowDatabase(NamedDestination):
    def __init__(self, folder: Path, name: str, run_id: str, config: Config) -> None:
        super().__init__(folder, name, run_id, config)
        self._run: Run | None = None

    def held(self) -> Mapping[Key, float]:
        self._run = self._found()
        if self._run is None:
            return {}
        return {
            Key(kind, metric.step): metric.timestamp / 1000
            for kind in (STEP, VERSION)
            for metric in self._client.get_metric_history(self._run.info.run_id, kind)
        }

    def clear(self) -> None:
        """MLflow keeps what is deleted where `mlflow gc` finds it, and shows it no more."""
        if self._run is not None:
            self._client.delete_run(self._run.info.run_id)
            self._run = None

    def write(self, point: Point) -> None:
        if self._run is None:
            self._run = self._begun(point)
        numbered = {**point.values, point.key.kind: point.key.number}
        metrics = [
            Metric(mlflow_name(name), value, round(point.time * 1000), point.key.number)
            for name, value in numbered.items()
        ]
        for first in range(0, len(metrics), _MOST_A_CALL):
            self._client.log_batch(self._run.info.run_id, metrics[first : first + _MOST_A_CALL])

    def flush(self) -> None:
        """Each call is committed as it returns."""

    def said(self) -> str:
        return f"look at it with: mlflow ui --backend-store-uri sqlite:///{self._file}"

    def open(self) -> None:
        logging.getLogger("mlflow").setLevel(logging.WARNING)  # it would tell of each table that it makes
        logging.getLogger("alembic").setLevel(logging.WARNING)
        _make(self._file)
        self._client = _client_of(self._file)
        found = self._client.get_experiment_by_name(EXPERIMENT)
        self._experiment = (
            found.experiment_id
            if found is not None
            else self._client.create_experiment(EXPERIMENT, artifact_location=str(self._folder.resolve() / "artifacts"))
        )

    @property
    def _file(self) -> Path:
        return self._folder.resolve() / "mlflow.db"

    def _found(self) -> Run | None:
        runs = self._client.search_runs([self._experiment], f"tags.`{_OF_RUN}` = '{self._id}'", max_results=1)
        return runs[0] if runs else None

    def _begun(self, first: Point) -> Run:
        run = self._client.create_run(
            self._experiment, start_time=round(first.time * 1000), tags={_OF_RUN: self._id}, run_name=self._name
        )
        params = [Param(mlflow_name(name), str(value)[:_LONGEST_VALUE]) for name, value in _flat(self._config).items()]
        for first_param in range(0, len(params), 100):
            self._client.log_batch(run.info.run_id, params=params[first_param : first_param + 100])
        return run


def _client_of(file: Path) -> MlflowClient:
    return MlflowClient(tracking_uri=f"sqlite:///{file}")


def _make(file: Path) -> None:
    """Make the database, which takes MLflow seconds, under a temporary name: what a kill leaves of it cannot be opened
    again, nor what two make at once."""
    with (file.parent / ".making.lock").open("w", encoding="utf-8") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        remove_leftovers_of(file)
        if not file.exists():
            temporary = temporary_name(file)
            _client_of(temporary)
            temporary.rename(file)
            fsync_directory(file.parent)


def _flat(config: Config, above: str = "") -> dict[str, object]:
    """Its keys as a recipe's overrides name them: learner.optimizer.lr."""
    found: dict[str, object] = {}
    for name, value in config.items():
        found |= _flat(value, f"{above}{name}.") if isinstance(value, Mapping) else {f"{above}{name}": value}
    return found

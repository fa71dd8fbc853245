"""From a run to the files that `kubectl apply -f DIR` takes, in the order of their names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from launch.cluster.kubernetes.base import KubernetesObject, to_yaml
from launch.cluster.kubernetes.engines import leader_worker_set
from launch.cluster.kubernetes.job import RUN_LABEL, RunOnKubernetes
from launch.cluster.kubernetes.jobset import job_set
from launch.cluster.kubernetes.policies import disruption_budgets, network_policies
from launch.cluster.kubernetes.surroundings import config_map, service_monitor, services, volume_claim
from pipeline.errors import RecipeError

Files = dict[str, list[dict[str, Any]]]
_TAKEN = (".yaml", ".yml", ".json")
"""Endings of the files that `kubectl apply -f DIR` takes."""


def render(run: RunOnKubernetes) -> Files:
    """Objects by file; none for a file that this run does without."""
    files: dict[str, list[KubernetesObject]] = {
        "00-recipe.yaml": [config_map(run)],
        "10-storage.yaml": [] if run.options.pvc else [volume_claim(run)],
        "20-services.yaml": [*services(run)],
        "30-network.yaml": [*network_policies(run)],
        "40-disruption.yaml": [*disruption_budgets(run)],
        "50-engines.yaml": [leader_worker_set(run)] if run.options.engines == "leaderworkerset" else [],
        "60-run.yaml": [job_set(run)],
        "70-monitoring.yaml": [service_monitor(run)] if run.options.monitors else [],
    }
    return {name: [one.to_dict() for one in objects] for name, objects in files.items()}


def read(folder: Path, files: Files, run: str) -> list[dict[str, Any]]:
    """Objects of an earlier rendering of the run. Raises RecipeError when a file that `write` would replace is
    damaged, or not of this run."""
    found = []
    for path in (path for name in files if (path := folder / name).exists()):
        try:
            objects = [*yaml.safe_load_all(path.read_text(encoding="utf-8"))]
        except (OSError, ValueError, yaml.YAMLError) as error:
            raise RecipeError(f"cannot read {path} ({' '.join(str(error).split())}); remove it") from error
        if not all(_is_of(run, one) for one in objects):
            raise RecipeError(
                f"{path} would be replaced, and is not of this run (its objects lack the label {RUN_LABEL}: {run}); "
                "move it, or give another --out"
            )
        found += objects
    return found


def _is_of(run: str, one: Any) -> bool:
    try:
        return bool(one["kind"] and one["metadata"]["name"] and one["metadata"]["labels"][RUN_LABEL] == run)
    except (KeyError, TypeError):
        return False


def write(files: Files, folder: Path) -> list[Path]:
    """Write them, and remove files of an earlier rendering that this one does without."""
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for name, objects in files.items():
        path = folder / name
        if objects:
            path.write_text(to_yaml(objects), encoding="utf-8")
            written.append(path)
        else:
            path.unlink(missing_ok=True)
    return written


def others(files: Files, folder: Path) -> list[str]:
    """Files of the folder that no rendering makes, and that `kubectl apply -f` takes all the same."""
    return sorted(path.name for path in folder.iterdir() if path.suffix in _TAKEN and path.name not in files)

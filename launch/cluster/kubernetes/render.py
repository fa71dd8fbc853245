"""From a run to the files that `kubectl apply -f DIR` takes, in the order of their names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from launch.cluster.kubernetes.base import KubernetesObject, to_yaml
from launch.cluster.kubernetes.engines import leader_worker_set
from launch.cluster.kubernetes.job import RunOnKubernetes
from launch.cluster.kubernetes.jobset import job_set
from launch.cluster.kubernetes.policies import disruption_budgets, network_policies
from launch.cluster.kubernetes.surroundings import config_map, service_monitor, services, volume_claim
from pipeline.errors import RecipeError

Files = dict[str, list[dict[str, Any]]]
_NAMES = "[0-9][0-9]-*.yaml"


def render(run: RunOnKubernetes) -> Files:
    """Objects by file."""
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
    return {name: [one.to_dict() for one in objects] for name, objects in files.items() if objects}


def read(folder: Path) -> list[dict[str, Any]]:
    """Objects of an earlier rendering. Raises RecipeError when a file is damaged."""
    found = []
    for path in sorted(folder.glob(_NAMES)):
        try:
            found += [one for one in yaml.safe_load_all(path.read_text()) if isinstance(one, dict)]
        except (OSError, yaml.YAMLError) as error:
            raise RecipeError(f"cannot read {path} ({' '.join(str(error).split())}); remove it") from error
    return found


def write(files: Files, folder: Path) -> list[Path]:
    """Write them, and remove files of an earlier rendering that this one lacks."""
    folder.mkdir(parents=True, exist_ok=True)
    for path in folder.glob(_NAMES):
        if path.name not in files:
            path.unlink()
    written = []
    for name, objects in files.items():
        path = folder / name
        path.write_text(to_yaml(objects))
        written.append(path)
    return written

"""From a run to the files that `kubectl apply -k DIR` takes, and that an overlay of the user's builds on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from launch.schedulers.kubernetes.base import KubernetesObject, to_yaml
from launch.schedulers.kubernetes.containers import download_job
from launch.schedulers.kubernetes.engines import leader_worker_set
from launch.schedulers.kubernetes.job import RUN_LABEL, RunOnKubernetes
from launch.schedulers.kubernetes.jobset import job_set
from launch.schedulers.kubernetes.policies import disruption_budgets, network_policies
from launch.schedulers.kubernetes.surroundings import alerts, config_map, service_monitor, services, volume_claim
from pipeline.errors import RecipeError

Files = dict[str, list[dict[str, Any]]]
KUSTOMIZATION = "kustomization.yaml"
"""Names all other files but the model's, which is there before the run."""
MODEL = "model/job.yaml"


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
        "70-monitoring.yaml": [service_monitor(run), alerts(run)] if run.options.monitors else [],
        MODEL: [download_job(run)] if run.options.download else [],
    }
    written = {name: [one.to_dict() for one in objects] for name, objects in files.items()}
    return written | {KUSTOMIZATION: [_kustomization([name for name in written if written[name] and name != MODEL])]}


def _kustomization(names: list[str]) -> dict[str, Any]:
    return dict(apiVersion="kustomize.config.k8s.io/v1beta1", kind="Kustomization", resources=names)


def read(folder: Path, files: Files, run: str) -> list[dict[str, Any]]:
    """Objects of an earlier rendering of the run. Raises RecipeError when a file that `write` would replace is
    damaged, or not of this run."""
    found = []
    for path in (path for name in files if name != KUSTOMIZATION and (path := folder / name).exists()):
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
    written = []
    for name, objects in files.items():
        path = folder / name
        if objects:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(to_yaml(objects), encoding="utf-8")
            written.append(path)
        else:
            path.unlink(missing_ok=True)
    return written

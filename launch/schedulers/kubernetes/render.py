"""Write a run's objects as files for `kubectl apply -k DIR`, which a user's overlay can build on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

from launch.schedulers.kubernetes.pods import download_job, job_set, leader_worker_set
from launch.schedulers.kubernetes.run import RUN_LABEL, Object, RunOnKubernetes
from launch.schedulers.kubernetes.surroundings import (
    config_map,
    disruption_budgets,
    monitors,
    network_policies,
    services,
    volume_claim,
)
from pipeline.errors import RecipeError

Files = dict[str, list[Object]]
KUSTOMIZATION = "kustomization.yaml"
"""The file that lists all others, except the model's Job, which runs before."""
MODEL = "model/job.yaml"
IMMUTABLE: dict[str, tuple[tuple[str, ...], ...]] = {
    "JobSet": (
        *(("spec", "replicatedJobs"), ("spec", "network"), ("spec", "startupPolicy")),
        *(("spec", "successPolicy"), ("spec", "failurePolicy"), ("spec", "managedBy")),
    ),
    "LeaderWorkerSet": (("spec", "leaderWorkerTemplate", "size"), ("spec", "networkConfig")),
    "ConfigMap": (("data",), ("immutable",)),
    "Job": (("spec",),),
    "PersistentVolumeClaim": (("spec", "accessModes"), ("spec", "storageClassName")),
}


def render(run: RunOnKubernetes) -> Files:
    """Build the objects of each file; an empty list for a file that the run does not need."""
    options = run.options
    files: Files = {
        "00-recipe.yaml": [config_map(run)],
        "10-storage.yaml": [] if options.pvc else [volume_claim(run)],
        "20-services.yaml": services(run),
        "30-network.yaml": network_policies(run),
        "40-disruption.yaml": disruption_budgets(run),
        "50-engines.yaml": [leader_worker_set(run)] if options.engines == "leaderworkerset" else [],
        "60-run.yaml": [job_set(run)],
        "70-monitoring.yaml": monitors(run) if options.monitors else [],
        MODEL: [download_job(run)] if options.download else [],
    }
    names = [name for name in files if files[name] and name != MODEL]
    kustomization = dict(apiVersion="kustomize.config.k8s.io/v1beta1", kind="Kustomization", resources=names)
    return {name: _without_none(objects) for name, objects in files.items()} | {KUSTOMIZATION: [kustomization]}


def _without_none(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_none(part) for name, part in value.items() if part is not None}
    return [_without_none(part) for part in value] if isinstance(value, list) else value


def read(folder: Path, files: Files, run: str) -> list[Object]:
    """Read an earlier rendering of the run. Raises RecipeError for damaged or foreign files that would be replaced."""
    found: list[Object] = []
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


def check_changes(before: Sequence[Object], after: Sequence[Object]) -> Iterator[str]:
    """Yield an error for each change between objects of the same name that a cluster refuses."""
    known = {(one["kind"], one["metadata"]["name"]): one for one in before}
    for one in after:
        old = known.get((one["kind"], one["metadata"]["name"]))
        for path in IMMUTABLE.get(one["kind"], ()) if old else ():
            sides: list[Any] = [old, one]
            for part in path:
                sides = [side.get(part) if isinstance(side, dict) else None for side in sides]
            if place := _difference(sides[0], sides[1], ".".join(path)):
                named = f"{one['kind']} {one['metadata']['name']}"
                yield f"{named}: {place} cannot be changed; delete the object first, then apply"


def _difference(before: Any, after: Any, where: str) -> str | None:
    if isinstance(before, dict) and isinstance(after, dict):
        for key in [*before, *(key for key in after if key not in before)]:
            if found := _difference(before.get(key), after.get(key), f"{where}.{key}"):
                return found
        return None
    if isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        for place, (old, new) in enumerate(zip(before, after, strict=True)):
            if found := _difference(old, new, f"{where}[{place}]"):
                return found
        return None
    return None if before == after else where


class _Dumper(yaml.SafeDumper):
    """A YAML dumper that indents lists and writes multi-line strings as blocks."""

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:  # noqa: ARG002 (PyYAML's name)
        return super().increase_indent(flow, False)

    def ignore_aliases(self, data: Any) -> bool:  # noqa: ARG002 (PyYAML's name)
        return True


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _text)


def to_yaml(objects: list[Object]) -> str:
    """Write the documents of one file, in order. The same objects give the same bytes."""
    return yaml.dump_all(
        objects, Dumper=_Dumper, sort_keys=False, default_flow_style=False, allow_unicode=True, width=2**16
    )

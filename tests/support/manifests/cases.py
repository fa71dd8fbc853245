"""Renderings for tests: the 32B recipe on 4 + 4 nodes of 8 GPUs, or with changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from launch.schedulers.kubernetes.render import KUSTOMIZATION, Files, render, to_yaml
from launch.schedulers.kubernetes.run import RunOnKubernetes, cluster_options, run_on_kubernetes
from pipeline.config.loader import find_recipe, load_recipe

LEARNER_IMAGE = "registry.example/evenkeel/learner@sha256:" + "1" * 64
ROLLOUT_IMAGE = "registry.example/evenkeel/rollout@sha256:" + "2" * 64


def run_of(*overrides: str, **options: Any) -> RunOnKubernetes:
    """The 32B recipe with overrides, on a cluster with options."""
    path = find_recipe(Path("qwen3_32b"))
    chosen = cluster_options(**(dict(learner_image=LEARNER_IMAGE, rollout_image=ROLLOUT_IMAGE) | options))
    return run_on_kubernetes(path, load_recipe(path, list(overrides)), chosen)


def rendered(*overrides: str, **options: Any) -> Files:
    """Its files."""
    return render(run_of(*overrides, **options))


def documents(files: Files) -> list[dict[str, Any]]:
    """All objects, as they are read from the files."""
    return [
        one for name, objects in files.items() if name != KUSTOMIZATION for one in yaml.safe_load_all(to_yaml(objects))
    ]

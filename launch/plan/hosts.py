"""Compute the host memory, disk and grace period that a role needs, for schedulers' job files. Loads no torch.

    learner host   copies of its ranks' shards during a save + weights being published + processes
    engine host    its weights while they are read + processes; on its disk, by delta, a replica of what is published

The constants below are assumptions; all else is counted. A scheduler that ends a job gives notice (Slurm's `--signal`,
Kubernetes' termination grace period). In that time a learner ends its step, a running publish and a running save, and
saves a checkpoint of what it trained meanwhile.
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from pathlib import Path

from launch.build.sizes import checkpoint_bytes
from launch.plan.footprint import GIB
from launch.plan.planner import PROCESS_BYTES, SHM_BYTES_PER_PROCESS, Planner, default_assumptions
from pipeline.config.algorithm import check_gpu_serves
from pipeline.config.loader import SHIPPED, find_recipe, load_recipe
from pipeline.config.recipe import Recipe
from pipeline.errors import ModelError, RecipeError

SAFETY = 2.0
"""Factor on estimated durations: notice that is too short costs the steps since the last checkpoint."""
FIXED_S = 60
"""Seconds that depend on no size: signals, closing process groups, metadata of the shared file system."""


# No formula gives these: assumed, not measured.
VERIFIER_BYTES = GIB
"""Host memory of each reward verifier process."""
COLLECTOR_BYTES = 8 * GIB
"""Host memory of the collector: tokenizer, a batch being built, a batch being written."""
ROUTER_BYTES = 2 * GIB
TMP_BYTES = 64 * GIB
"""Largest size of a role's temporary files: compiled kernels and library caches."""
CPUS_PER_GPU = 8
DRAIN_S = 60
"""Longest time that an ending engine serves its requests; requests cut off are issued again."""
MARGIN_S = 60
"""Seconds added to every wait: starting programs, creating folders, shutting down."""


@dataclass(frozen=True, kw_only=True)
class HostNeeds:
    cpus: int
    memory_bytes: int
    """Host memory, /dev/shm included."""
    shm_bytes: int = 0
    tmp_bytes: int
    """The most that temporary files take, `replica_bytes` included."""
    replica_bytes: int = 0
    """The weights that `weights.channel: delta` keeps on an engine's host."""
    stop_s: int
    """Seconds from the request to end until everything worth keeping is on disk."""


@dataclass(frozen=True, kw_only=True)
class ClusterNeeds:
    learner: HostNeeds
    engine: HostNeeds
    collector: HostNeeds
    router: HostNeeds
    checkpoint_bytes: int
    first_policy_s: int
    """Seconds until version 0 is written, for which engines wait."""


def cluster_needs(planner: Planner, *, gpus_per_learner_host: int, gpus_per_engine_host: int) -> ClusterNeeds:
    """Compute the needs of hosts with the given numbers of GPUs.

    An engine's weights pass through host memory once; a replica holds two versions, the served one and the next.
    """
    recipe, published = planner.recipe, planner.engine_model_bytes
    rollout, workers = recipe.rollout, recipe.reward.workers
    replica = 2 * math.ceil(published) if recipe.weights.channel == "delta" else 0
    learner_shm = gpus_per_learner_host * SHM_BYTES_PER_PROCESS
    engine_shm = gpus_per_engine_host * SHM_BYTES_PER_PROCESS
    return ClusterNeeds(
        learner=HostNeeds(
            cpus=gpus_per_learner_host * CPUS_PER_GPU,
            memory_bytes=sum(planner.learner_host(gpus_per_learner_host).values()),
            shm_bytes=learner_shm,
            tmp_bytes=TMP_BYTES,
            stop_s=grace_s(planner),
        ),
        engine=HostNeeds(
            cpus=gpus_per_engine_host * CPUS_PER_GPU,
            memory_bytes=int(gpus_per_engine_host * (planner.capacity.weight_bytes + PROCESS_BYTES)) + engine_shm,
            shm_bytes=engine_shm,
            tmp_bytes=TMP_BYTES + replica,
            replica_bytes=replica,
            stop_s=min(DRAIN_S, math.ceil(rollout.request_deadline_s)) + MARGIN_S,
        ),
        collector=HostNeeds(
            cpus=workers + 2,
            memory_bytes=COLLECTOR_BYTES + workers * VERIFIER_BYTES,
            tmp_bytes=TMP_BYTES,
            stop_s=MARGIN_S,
        ),
        router=HostNeeds(cpus=2, memory_bytes=ROUTER_BYTES, tmp_bytes=TMP_BYTES, stop_s=MARGIN_S),
        checkpoint_bytes=checkpoint_bytes(planner.config, recipe),
        first_policy_s=math.ceil(SAFETY * (2 * published / (planner.assumed.disk_gb_s * 1e9))) + MARGIN_S,
    )


def check_gpu_hosts_serve(recipe: Recipe) -> None:
    """Raise RecipeError for a format that no GPU serves, and for a teacher on the collector's host without GPUs."""
    if recipe.started_teacher is not None:
        raise RecipeError(
            f"distillation.path is {recipe.started_teacher.path}: the teacher would be served beside the collector, "
            "whose host has no GPU on a cluster; serve it yourself (sglang.launch_server), and set distillation.urls"
        )
    check_gpu_serves(recipe.rollout.quantized_format)


def planner_that_fits(
    recipe_path: Path,
    recipe: Recipe,
    *,
    gpu_gib: float,
    disk_gb_s: float | None = None,
    sizes: Path | None = None,
) -> Planner:
    """Plan a recipe on exactly the GPUs that it asks for; `sizes` as for `Planner`. Raises RecipeError for a misfit."""
    check_gpu_hosts_serve(recipe)
    gpus = recipe.learner.num_processes + recipe.rollout.engines * recipe.rollout.tensor_parallel
    assumed = default_assumptions(recipe, dict(disk_gb_s=disk_gb_s))
    planner = Planner(recipe_path, recipe, assumed, gpus=gpus, gpu_gib=gpu_gib, sizes=sizes)
    if reasons := planner.misfit():
        raise RecipeError(
            f"{recipe.run.name} does not fit {gpus} GPUs of {gpu_gib:g} GiB: {'; '.join(reasons)}; see `evenkeel plan`"
        )
    return planner


def grace_s(planner: Planner) -> int:
    """Return the seconds of notice to request from the scheduler for a learner, rounded up to tens."""
    timed = planner.durations(planner.recipe.learner)
    save_s = checkpoint_bytes(planner.config, planner.recipe) / (planner.assumed.disk_gb_s * 1e9)
    planned = SAFETY * (timed.score_s + timed.update_s + timed.publish_s + 2 * save_s) + FIXED_S
    return 10 * math.ceil(planned / 10)


def sizes_folder(recipe_path: Path, model_path: Path, given: Path | None) -> Path | None:
    """Return the folder whose config.json to plan with, or None for `model_path`: `given`, or a shipped recipe's, with
    a note on stderr, when an absolute model.path is not on this machine. Raises ModelError."""
    if given is not None:
        if not (given / "config.json").is_file():
            raise ModelError(
                f"--model-config {given} holds no config.json; give a folder that has one (no weights are needed)"
            )
        return given
    if not model_path.is_absolute() or (model_path / "config.json").is_file():
        return None
    path = find_recipe(recipe_path)
    shipped = SHIPPED / load_recipe(path).model.path if path.resolve().parent == SHIPPED.resolve() else None
    if shipped is None or not (shipped / "config.json").is_file():
        raise ModelError(
            f"model.path {model_path} is not on this machine, and {path} names no sizes; give a folder with the "
            "model's config.json: --model-config FOLDER (no weights are needed)"
        )
    print(
        f"note: model.path {model_path} is not on this machine; planned with the sizes of recipe {path.stem}, "
        f"{shipped / 'config.json'}; --model-config FOLDER gives others",
        file=sys.stderr,
    )
    return shipped

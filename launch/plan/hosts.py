"""Say what a host needs beside GPU memory, and how long an orderly end takes: launchers ask here, so that no number of
a job file is typed by hand. Loads no torch.

    learner host   what its ranks put into host memory while they save + weights that are being published + processes
    engine host    its weights while they are read + processes; on its disk, by delta, a replica of what is published

Bytes are counted; what is assumed is named in `HostAllowance`. A scheduler that ends a job gives notice of so many
seconds (Slurm's `--signal`, Kubernetes' termination grace period): a learner needs the rest of its step, a publish and
a save that are under way, and a checkpoint of what was trained meanwhile.
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from pathlib import Path

from launch.build.sizes import checkpoint_bytes
from launch.plan.footprint import GIB, footprints
from launch.plan.planner import Planner, default_assumptions
from pipeline.config.algorithm import check_gpu_serves
from pipeline.config.loader import SHIPPED, find_recipe, load_recipe
from pipeline.config.recipe import Recipe
from pipeline.errors import ModelError, RecipeError

SAFETY = 2.0
"""The durations are guesses by roofline; notice that is too short costs the steps since the last checkpoint."""
FIXED_S = 60
"""For what depends on no size: signals, process groups that close, metadata of the shared file system."""


# What no formula gives: assumed, not measured.
PROCESS_BYTES = 6 * GIB
"""Of each process that has a GPU: Python, CUDA's and NCCL's pinned memory, the unused end of blocks of our own."""
SHM_BYTES_PER_PROCESS = 2 * GIB
"""NCCL's and SGLang's buffers between the processes of a host."""
VERIFIER_BYTES = GIB
"""Of each process that checks answers."""
COLLECTOR_BYTES = 8 * GIB
"""The collector itself: tokenizer, a batch being built, a batch being written."""
ROUTER_BYTES = 2 * GIB
TMP_BYTES = 64 * GIB
"""Temporary files of any role at the most: compiled kernels, what libraries cache."""
CPUS_PER_GPU = 8
DRAIN_S = 60
"""How long an engine that was asked to end lets requests go on; what is cut off is asked again."""
MARGIN_S = 60
"""Added to every other wait: starting programs, creating folders, saying good-bye."""


@dataclass(frozen=True, kw_only=True)
class HostNeeds:
    """Of one host (or pod) of a role."""

    cpus: int
    memory_bytes: int
    """/dev/shm included."""
    shm_bytes: int = 0
    tmp_bytes: int
    """What temporary files may take, `replica_bytes` included."""
    replica_bytes: int = 0
    """Of these, what is sure to be there: weights that `weights.channel: delta` keeps on an engine's host."""
    stop_s: int
    """From being asked to end until everything worth keeping is on the disk."""


@dataclass(frozen=True, kw_only=True)
class ClusterNeeds:
    """Of all roles of a recipe."""

    learner: HostNeeds
    engine: HostNeeds
    collector: HostNeeds
    router: HostNeeds
    checkpoint_bytes: int
    first_policy_s: int
    """Seconds until version 0 is written: engines wait for it."""


def cluster_needs(planner: Planner, *, gpus_per_learner_host: int, gpus_per_engine_host: int) -> ClusterNeeds:
    """Work out what hosts with so many GPUs of a role need.

    A learner's save copies the shard of each rank to host memory before it writes it, and gathers nothing
    (megatron_bridge.checkpoint.training_state). Every rank that sends to an engine keeps its stage's share of a version
    there too (megatron_bridge.weight_sync.streaming), as many of them as can be on one host; by disk, one process reads
    or writes the whole policy. An engine's weights pass through host memory once while they are read; a replica holds
    two versions, the one that is served and the next one (rollout_sglang.weights).
    """
    recipe, published = planner.recipe, planner.engine_model_bytes
    learner, rollout, workers = recipe.learner, recipe.rollout, recipe.reward.workers
    # Host copies of the reference's share, and of that of older versions (megatron_bridge.step).
    copies = (recipe.reference is not None) + recipe.num_kept_versions
    stages = footprints(planner.config, learner, planner.workload(learner))
    shard = max(one.parameters * (1 + copies) + one.optimizer for one in stages)
    senders = min(rollout.engines, learner.num_processes // learner.pipeline_parallel)
    snapshot = published
    if recipe.weights.channel != "disk":
        sending = min(gpus_per_learner_host, learner.pipeline_parallel * senders)
        snapshot = published * sending / learner.pipeline_parallel
    replica = 2 * math.ceil(published) if recipe.weights.channel == "delta" else 0
    learner_shm = gpus_per_learner_host * SHM_BYTES_PER_PROCESS
    engine_shm = gpus_per_engine_host * SHM_BYTES_PER_PROCESS
    return ClusterNeeds(
        learner=HostNeeds(
            cpus=gpus_per_learner_host * CPUS_PER_GPU,
            memory_bytes=int(gpus_per_learner_host * (shard + PROCESS_BYTES) + snapshot) + learner_shm,
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
    """Raises RecipeError for a format that no GPU serves, and for a teacher beside the collector, which has none."""
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
    """Plan a recipe on exactly as many GPUs as it asks for; `sizes` as `Planner` takes it. Raises RecipeError
    when it does not fit them."""
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
    """Return the seconds of notice to ask of the scheduler for a learner, in whole tens."""
    timed = planner.durations(planner.recipe.learner)
    save_s = checkpoint_bytes(planner.config, planner.recipe) / (planner.assumed.disk_gb_s * 1e9)
    planned = SAFETY * (timed.score_s + timed.update_s + timed.publish_s + 2 * save_s) + FIXED_S
    return 10 * math.ceil(planned / 10)


def sizes_folder(recipe_path: Path, model_path: Path, given: Path | None) -> Path | None:
    """Find the folder with the config.json to plan with: `given` (--model-config), or that of a shipped recipe when an
    absolute model.path is not on this machine, which is said on stderr. None: wherever `model_path` leads.

    Raises ModelError when there is none.
    """
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

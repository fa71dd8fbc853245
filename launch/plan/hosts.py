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
from launch.plan.costs import Assumptions
from launch.plan.footprint import GIB, footprints
from launch.plan.planner import Machine, Planner, default_assumptions
from pipeline.config.algorithm import check_gpu_serves
from pipeline.config.loader import SHIPPED, find_recipe, load_recipe
from pipeline.config.recipe import Recipe
from pipeline.errors import ModelError, RecipeError

SAFETY = 2.0
"""The durations are guesses by roofline; notice that is too short costs the steps since the last checkpoint."""
FIXED_S = 60
"""For what depends on no size: signals, process groups that close, metadata of the shared file system."""


@dataclass(frozen=True, kw_only=True)
class HostAllowance:
    """What no formula gives: assumed, not measured."""

    process_bytes: int = 6 * GIB
    """Of each process that has a GPU: Python, CUDA's and NCCL's pinned memory, the unused end of blocks of our own."""
    shm_bytes_per_process: int = 2 * GIB
    """NCCL's and SGLang's buffers between the processes of a host."""
    verifier_bytes: int = GIB
    """Of each process that checks answers."""
    collector_bytes: int = 8 * GIB
    """The collector itself: tokenizer, a batch being built, a batch being written."""
    router_bytes: int = 2 * GIB
    tmp_bytes: int = 64 * GIB
    """Temporary files of any role at the most: compiled kernels, what libraries cache."""
    cpus_per_gpu: int = 8
    drain_s: int = 60
    """How long an engine that was asked to end lets requests go on; what is cut off is asked again."""
    margin_s: int = 60
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
    save_s: int
    """Seconds of writing a checkpoint."""
    first_policy_s: int
    """Seconds until version 0 is written: engines wait for it."""


def cluster_needs(planner: Planner, *, gpus_per_learner_host: int, gpus_per_engine_host: int) -> ClusterNeeds:
    """What hosts with so many GPUs of a role need."""
    allowed = HostAllowance()
    seconds_of_disk = 2 * planner.engine_model_bytes / (planner.assumed.disk_gb_s * 1e9)
    workers = planner.recipe.reward.workers
    return ClusterNeeds(
        learner=_learner(planner, gpus_per_learner_host, allowed),
        engine=_engine(planner, gpus_per_engine_host, allowed),
        collector=HostNeeds(
            cpus=workers + 2,
            memory_bytes=allowed.collector_bytes + workers * allowed.verifier_bytes,
            tmp_bytes=allowed.tmp_bytes,
            stop_s=allowed.margin_s,
        ),
        router=HostNeeds(
            cpus=2, memory_bytes=allowed.router_bytes, tmp_bytes=allowed.tmp_bytes, stop_s=allowed.margin_s
        ),
        checkpoint_bytes=checkpoint_bytes(planner.config, planner.recipe),
        save_s=math.ceil(planned_stop_time(planner).save_s),
        first_policy_s=math.ceil(SAFETY * seconds_of_disk) + allowed.margin_s,
    )


def _learner(planner: Planner, gpus: int, allowed: HostAllowance) -> HostNeeds:
    """A save copies the shard of each rank to host memory before it writes it, and gathers nothing
    (megatron_bridge.checkpoint.training_state). What is published lies there too, until its folder is written."""
    stages = footprints(planner.config, planner.recipe.learner, planner.workload(planner.recipe.learner))
    # Host copies of the reference's share, and of that of older versions (megatron_bridge.step).
    copies = (planner.recipe.reference is not None) + planner.recipe.num_kept_versions
    shard = max(one.parameters * (1 + copies) + one.optimizer for one in stages)
    shm = gpus * allowed.shm_bytes_per_process
    return HostNeeds(
        cpus=gpus * allowed.cpus_per_gpu,
        memory_bytes=int(gpus * (shard + allowed.process_bytes) + _snapshot_bytes(planner, gpus)) + shm,
        shm_bytes=shm,
        tmp_bytes=allowed.tmp_bytes,
        stop_s=planned_stop_time(planner).grace_s,
    )


def _snapshot_bytes(planner: Planner, gpus: int) -> float:
    """Every rank that sends to an engine keeps its stage's share of a version (megatron_bridge.weight_sync.streaming);
    as many of them as can be on one host. By disk, one process reads or writes the whole policy."""
    recipe, stages = planner.recipe, planner.recipe.learner.pipeline_parallel
    if recipe.weights.channel == "disk":
        return planner.engine_model_bytes
    senders = min(recipe.rollout.engines, recipe.learner.num_processes // stages)
    return planner.engine_model_bytes * min(gpus, stages * senders) / stages


def _engine(planner: Planner, gpus: int, allowed: HostAllowance) -> HostNeeds:
    """Weights pass through host memory once while they are read. A replica holds two versions, the one that is served
    and the next one (rollout_sglang.weights)."""
    shm = gpus * allowed.shm_bytes_per_process
    replica = 2 * math.ceil(planner.engine_model_bytes) if planner.recipe.weights.channel == "delta" else 0
    return HostNeeds(
        cpus=gpus * allowed.cpus_per_gpu,
        memory_bytes=int(gpus * (planner.capacity.weight_bytes + allowed.process_bytes)) + shm,
        shm_bytes=shm,
        tmp_bytes=allowed.tmp_bytes + replica,
        replica_bytes=replica,
        stop_s=min(allowed.drain_s, math.ceil(planner.recipe.rollout.request_deadline_s)) + allowed.margin_s,
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
    """The planner of a recipe on exactly as many GPUs as it asks for; `sizes` as `Planner` takes it. Raises RecipeError
    when it does not fit them."""
    check_gpu_hosts_serve(recipe)
    gpus = recipe.learner.num_processes + recipe.rollout.engines * recipe.rollout.tensor_parallel
    given = {} if disk_gb_s is None else dict(disk_gb_s=disk_gb_s)
    assumed: Assumptions = default_assumptions(recipe, given)
    planner = Planner(recipe_path, recipe, Machine(gpus=gpus, gpu_gib=gpu_gib), assumed, sizes)
    if reasons := planner.misfit():
        raise RecipeError(
            f"{recipe.run.name} does not fit {gpus} GPUs of {gpu_gib:g} GiB: {'; '.join(reasons)}; see `evenkeel plan`"
        )
    return planner


@dataclass(frozen=True, kw_only=True)
class StopTime:
    """Seconds that an orderly end may take."""

    step_s: float
    publish_s: float
    save_s: float
    disk_gb_s: float
    """At which saves are planned to write."""

    @property
    def grace_s(self) -> int:
        """What to ask of the scheduler: whole tens of seconds."""
        planned = SAFETY * (self.step_s + self.publish_s + 2 * self.save_s) + FIXED_S
        return 10 * math.ceil(planned / 10)


def stop_time(recipe_path: Path, recipe: Recipe, disk_gb_s: float | None = None, sizes: Path | None = None) -> StopTime:
    """Of a recipe's learner. Needs config.json of the model, as `evenkeel plan` does, or that in the folder `sizes`.
    Raises ModelError, and RecipeError for a `disk_gb_s` that is no speed."""
    gpus = recipe.learner.num_processes + recipe.rollout.engines * recipe.rollout.tensor_parallel
    assumed = default_assumptions(recipe, dict(disk_gb_s=disk_gb_s))
    machine = Machine(gpus=gpus, gpu_gib=80.0)  # none of these times depends on it
    return planned_stop_time(Planner(find_recipe(recipe_path), recipe, machine, assumed, sizes))


def planned_stop_time(planner: Planner) -> StopTime:
    """Of the learner of a plan."""
    timed = planner.durations(planner.recipe.learner)
    return StopTime(
        step_s=timed.score_s + timed.update_s,
        publish_s=timed.publish_s,
        save_s=checkpoint_bytes(planner.config, planner.recipe) / (planner.assumed.disk_gb_s * 1e9),
        disk_gb_s=planner.assumed.disk_gb_s,
    )


def sizes_folder(recipe_path: Path, model_path: Path, given: Path | None) -> Path | None:
    """The folder with the config.json to plan with: `given` (--model-config), or that of a shipped recipe when an
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
    shipped = _shipped_sizes(path)
    if shipped is None:
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


def _shipped_sizes(path: Path) -> Path | None:
    """The folder of sizes that a shipped recipe names; None for any other recipe, or when it names none."""
    if path.resolve().parent != SHIPPED.resolve():
        return None
    folder = SHIPPED / load_recipe(path).model.path
    return folder if (folder / "config.json").is_file() else None

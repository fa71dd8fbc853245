"""What a run needs of the machine that it begins on, looked at in less than a second, before anything is written or
started: the learner's packages, a model with weights, a GPU where the recipe asks for one, ports, and a folder with
room."""

from __future__ import annotations

import os
from pathlib import Path

from launch.build.sizes import checkpoint_bytes
from launch.extras import LEARNER, absent, how_to_install
from launch.run.starter import metrics_ports, ports_of
from megatron_bridge.hf.model_config import ModelConfig, read_hf_config
from megatron_bridge.model.te_precision import is_fp8
from pipeline.config.loader import SHIPPED
from pipeline.config.recipe import Recipe
from pipeline.data.files import require_space
from pipeline.data.run_directory import RunDirectory
from pipeline.errors import MachineError, PortInUseError, RecipeError
from rollout_sglang.server.process import check_port_free
from rollout_sglang.server.start import has_cuda


def check_learner_here(recipe: Recipe) -> None:
    """Raises MachineError where this machine cannot run the recipe's learner."""
    if missing := absent(LEARNER):
        raise MachineError(
            f"this machine has no {', '.join(missing)}, which the learner needs: {how_to_install(*missing)}"
        )
    precision = recipe.learner.precision
    if not is_fp8(precision):
        return
    remedy = "or bf16, with learner.fp8_emulation=true to train under the rollout's FP8 all the same"
    if not has_cuda():
        raise MachineError(
            f"learner.precision is {precision}, which Transformer Engine computes on a GPU, and this machine has none; "
            f"use fp32, {remedy}"
        )
    if absent(("transformer_engine",)):
        raise MachineError(
            f"learner.precision is {precision}, and this machine has no Transformer Engine: "
            f"{how_to_install('transformer_engine')}; or use fp32, {remedy}"
        )


def check_model_here(recipe: Recipe) -> None:
    """Raises RecipeError where model.path leads to sizes that come with Even Keel, from whichever folder."""
    path = recipe.model.path
    place = path if path.exists() else SHIPPED / path
    if (place / "config.json").is_file() and place.resolve().parent == (SHIPPED / "models").resolve():
        raise RecipeError(
            f"model.path is {path}, sizes that come with Even Keel for `evenkeel plan`: that folder holds no weights; "
            "fetch or make the model and set model.path to its folder"
        )


def check_ports(recipe: Recipe, metrics_port: int | None = None) -> None:
    """Raises PortInUseError when a port is taken that the recipe names, or at which a role would show its metrics: the
    roles would find it one after another, and be started again and again."""
    named = ports_of(recipe.rollout)
    for port in named:
        check_port_free(port)
    for role, port in metrics_ports(recipe, metrics_port).items():
        try:
            check_port_free(port)
        except PortInUseError:
            trouble = "is taken"
        else:
            trouble = "is one of those from rollout.port on" if port in named else ""
        if trouble:
            raise PortInUseError(
                f"port {port} {trouble}, and the {role} shows its metrics there; give another --metrics-port, or none"
            )


def check_room(recipe: Recipe) -> None:
    """Raises MachineError where the run's folder cannot be written, DiskFullError where it is too full for what a run
    keeps: policies and checkpoints, one of each while it is written."""
    run = RunDirectory(recipe.directory)
    check_folder(run.path, "run.root")
    config = ModelConfig.from_hf(read_hf_config(recipe.model.path))
    policy = config.num_parameters * recipe.learner.parameter_bytes
    if not run.saved_steps():
        policies = min(recipe.weights.keep + 2, recipe.run.steps + 1)  # the served one, and the one that is written
        checkpoints = min(recipe.checkpoint.keep + 1, -(-recipe.run.steps // recipe.checkpoint.every))
        kept = f"{policies} policies (weights.keep) and {checkpoints} checkpoints (checkpoint.keep)"
        needed = policies * policy + checkpoints * checkpoint_bytes(config, recipe)
        require_space(nearest_above(run.path), needed, f"{kept} of run {recipe.run.name}")


def check_folder(folder: Path, key: str) -> None:
    """Raises MachineError, which names the recipe key or option, where nothing can be written below a folder."""
    there = nearest_above(folder)
    if not there.is_dir():
        raise MachineError(f"{folder} cannot be made: {there} is a file; set {key} to a folder")
    if os.statvfs(there).f_flag & os.ST_RDONLY:
        raise MachineError(f"{folder} cannot be written: {there} is mounted read-only; set {key} to another folder")
    if not os.access(there, os.W_OK | os.X_OK):
        raise MachineError(
            f"{folder} cannot be written: this user may not write in {there}; set {key} to another folder, or give the "
            "user the permission"
        )


def nearest_above(path: Path) -> Path:
    """The path itself, or the nearest above it that exists."""
    path = path.absolute()
    while not os.path.lexists(path) and path != path.parent:
        path = path.parent
    return path

"""From a recipe to one engine's start parameters, and whether this machine can run such an engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from launch.build.components import build_expert_shape, quant_map_of
from launch.build.engine_arguments import check_extra_args
from pipeline.config.formats import check_gpu_serves
from pipeline.config.recipe import Recipe
from pipeline.data.quant_maps import read_quant_map
from pipeline.data.run_directory import RunDirectory
from pipeline.errors import RecipeError
from pipeline.server_arguments import option
from precision.formats.quant_map_file import QuantMapFile
from precision.formats.rollout_format import RolloutFormat
from rollout_sglang.server.rollout_python import require_sglang
from rollout_sglang.server.sglang_compat import ServerInfo, dialect_of
from rollout_sglang.server.start import EngineSpec, has_cuda
from rollout_sglang.weights.update_lease import Updates

_ON_CPU = {"--attention-backend": "torch_native", "--device": "cpu", "--fp8-gemm-backend": None}
"""SGLang's arguments that name kernels or a device, and what a CPU has of them."""


def check_engines(recipe: Recipe) -> None:
    """Raises EngineStartError when there is no SGLang to start, RecipeError when that release or this machine cannot do
    what the recipe asks."""
    check_extra_args(recipe)
    rollout_format = recipe.rollout.quantized_format
    if has_cuda():
        check_gpu_serves(rollout_format)
    quantization = "fp8" if rollout_format is RolloutFormat.FP8_TENSOR else None
    dialect = dialect_of(ServerInfo(version=require_sglang(), quantization=quantization))
    if recipe.weights.channel not in ("disk", "delta") and dialect.no_tensors:
        raise RecipeError(f"weights.channel is {recipe.weights.channel}: {dialect.no_tensors}")
    if build_expert_shape(recipe) is not None and not dialect.records_experts:
        raise RecipeError(
            f"rollout.replay_experts is true, but SGLang {dialect.version} is older than 0.5.23, the first one that "
            "is asked for routed experts; install that, or set it to false"
        )
    kv_cache = option(recipe.rollout.extra_args, "--kv-cache-dtype")
    if kv_cache not in (None, "auto", "bf16", "bfloat16"):
        raise RecipeError(
            f"rollout.extra_args has --kv-cache-dtype {kv_cache}: a published policy holds no scales for it, "
            "and SGLang would take 1.0 without a word, at which keys above 448 are cut off; leave it out"
        )
    if has_cuda():
        return
    asked = {name: option(recipe.rollout.extra_args, name) for name in _ON_CPU}
    foreign = [f"{name} {value}" for name, value in asked.items() if value not in (None, _ON_CPU[name])]
    if foreign:
        raise RecipeError(
            f"rollout.extra_args has {', '.join(foreign)}, for a CUDA GPU, and this machine has none; run it on one, "
            "or at a toy size on the CPU with --set rollout.extra_args=[] and a model such as the demo's"
        )


def shares_gpus(recipe: Recipe) -> bool:
    """Whether learner and engines run on the same GPUs. An engine takes a share of the memory that is free when it
    starts, so nothing else may take memory meanwhile."""
    return recipe.weights.channel == "ipc" and has_cuda()


def engine_spec(
    run: RunDirectory,
    recipe: Recipe,
    index: int,
    port: int,
    api_key: str | None,
    *,
    log: Path | None,
    weights: tuple[int, Path] | None = None,
    **place: Any,
) -> EngineSpec:
    """Engine `index`, which starts with the newest version whose folder is complete, or with the version and the folder
    of `weights`.

    The newest is the published version, or an older one while the folder behind a broadcast is still being written. A
    resync then gives the engine the published version before it gets requests. `place` is where it runs (EngineSpec:
    host, nodes, node, rendezvous).
    """
    rollout = recipe.rollout
    if weights is None:
        newest = run.newest_policy(run.published_version())
        weights = newest, run.policy_directory(newest)
    version, folder = weights
    fp32_head = ("--enable-fp32-lm-head",) if recipe.model.fp32_lm_head else ()
    routes = ("--enable-return-routed-experts",) if rollout.replay_experts else ()
    return EngineSpec(
        model=folder,
        port=port,
        dtype=engine_dtype(recipe),
        log=log,
        version=version,
        api_key=api_key,
        tensor_parallel=rollout.tensor_parallel,
        context_tokens=rollout.context_tokens,
        seed=(recipe.run.seed + index) % (1 << 32),  # NumPy, which SGLang seeds, takes no larger one
        extra_args=(*fp32_head, *routes, *rollout.extra_args),
        update_floor=Updates(run.updates).newest(),
        **served_formats(recipe, folder),
        **place,
    )


def served_formats(recipe: Recipe, folder: Path) -> dict[str, Any]:
    """What an engine that serves the policy in `folder` is told about formats (EngineSpec: precision, full_precision).

    The folder says it, not the recipe: a later version may have another map than the run began with. Raises
    RecipeError for a map that the engine or the model does not fit.
    """
    precision = recipe.rollout.precision
    file = read_quant_map(folder)
    if file is None:
        return dict(precision=precision)
    quant_map = quant_map_of(recipe, file)
    check_map_dtype(recipe, file)
    if quant_map.rollout_format is None:
        return dict(precision="fp32" if engine_dtype(recipe) == "float32" else "bf16")
    return dict(precision=precision, full_precision=quant_map.ignored_layers())


def check_map_dtype(recipe: Recipe, file: QuantMapFile) -> None:
    """Raises RecipeError when the map names a dtype that the run's engines do not compute in."""
    try:
        file.check_dtype(engine_dtype(recipe))
    except ValueError as error:
        raise RecipeError(f"rollout.quant_map: {error}") from error


def engine_dtype(recipe: Recipe) -> Literal["float32", "bfloat16"]:
    """The dtype of activations and of weights that are not quantized. FP8 kernels of a GPU take 16-bit activations
    only."""
    rollout = recipe.rollout.precision
    exact = recipe.learner.precision == "fp32" and rollout != "bf16" and not (rollout != "fp32" and has_cuda())
    return "float32" if exact else "bfloat16"

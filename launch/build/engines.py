"""Turn a recipe into an engine's start parameters, check that this machine can run it, and build the fleet.

SGLang arguments of a recipe (rollout.extra_args, distillation.extra_args) come last on the command line, where the last
one wins. An argument that Even Keel sets too would silently replace what the recipe says elsewhere, which learner,
planner and weight checks rely on. SGLang completes the beginning of a name, so beginnings are refused, too.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from launch.build.api_key import read_api_key
from launch.build.components import build_expert_shape, quant_map_of
from megatron_bridge.hf.model_config import ModelConfig, read_hf_config
from pipeline.config.algorithm import check_gpu_serves
from pipeline.config.recipe import Recipe
from pipeline.data.epochs import Epoch
from pipeline.data.quant_maps import read_quant_map
from pipeline.data.run_directory import RunDirectory
from pipeline.errors import RecipeError
from pipeline.gpu_needs import DATA_PARALLEL, OWN_PLACES, PIPELINE_PARALLEL, option
from pipeline.nccl import DISTRIBUTIONS, mismatch
from precision.formats.quant_map import QuantMapFile
from precision.formats.rollout_format import RolloutFormat
from rollout_sglang.engine_pool import OnChange
from rollout_sglang.fleet import Fleet, FleetSettings
from rollout_sglang.protocol import ServerInfo, dialect_of
from rollout_sglang.server.capacity import captured_requests
from rollout_sglang.server.rollout_python import package_version, require_sglang, rollout_python
from rollout_sglang.server.start import EngineSpec, has_cuda
from rollout_sglang.weights.update_lease import Updates

if TYPE_CHECKING:
    from rollout_sglang.weights.expected_checksums import ExpectedChecksums

_ON_CPU = {"--attention-backend": "torch_native", "--device": "cpu", "--fp8-gemm-backend": None}
"""SGLang argument for a kernel or a device → its only value on a CPU; None if it has none."""


def check_engines(recipe: Recipe) -> None:
    """Raise EngineStartError without an SGLang, RecipeError if its release or this machine cannot run the recipe."""
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
        check_nccl(recipe)
        return
    asked = {name: option(recipe.rollout.extra_args, name) for name in _ON_CPU}
    foreign = [f"{name} {value}" for name, value in asked.items() if value not in (None, _ON_CPU[name])]
    if foreign:
        raise RecipeError(
            f"rollout.extra_args has {', '.join(foreign)}, for a CUDA GPU, and this machine has none; run it on one, "
            "or at a toy size on the CPU with --set rollout.extra_args=[] and a model such as the demo's"
        )


def check_nccl(recipe: Recipe) -> None:
    """Raise RecipeError if the learner here and engines by EVENKEEL_ROLLOUT_PYTHON have packages of NCCL that form no
    group, and the recipe broadcasts weights. What images bring without a package is compared at the first publish."""
    if recipe.weights.channel != "broadcast" or not recipe.rollout.started_engines or rollout_python() is None:
        return
    learner, engines = (package_version(*DISTRIBUTIONS, here=here) or "" for here in (True, False))
    if why := mismatch(learner, engines):
        raise RecipeError(f"weights.channel is broadcast, with {why}")


def shares_gpus(recipe: Recipe) -> bool:
    """Return whether learner and engines share GPUs. An engine takes a share of the memory that is free when it starts,
    so the learner may not allocate meanwhile."""
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
    """Return the spec of engine `index`, with the newest complete version or with (version, folder) in `weights`.

    While the folder of a broadcast version is being written, the newest complete version is older than the published
    one; a resync then gives the engine the published version before it gets requests. `place` is where the engine runs
    (EngineSpec: host, nodes, node, rendezvous).
    """
    rollout = recipe.rollout
    if weights is None:
        newest = run.newest_policy(run.published_version())
        weights = newest, run.policy_directory(newest)
    version, folder = weights
    fp32_head = ("--enable-fp32-lm-head",) if recipe.model.fp32_lm_head else ()
    routes = ("--enable-return-routed-experts",) if rollout.replay_experts else ()
    saver = ("--enable-memory-saver",) if rollout.colocated and has_cuda() else ()
    return EngineSpec(
        model=folder,
        port=port,
        dtype=engine_dtype(recipe),
        log=log,
        version=version,
        api_key=api_key,
        tensor_parallel=rollout.tensor_parallel,
        context_tokens=rollout.context_tokens,
        seed=recipe.run.seed + index,
        extra_args=(*fp32_head, *routes, *saver, *rollout.extra_args),
        captured_requests=captured_requests(rollout),
        update_floor=Updates(run.updates).newest(),
        **served_formats(recipe, folder),
        **place,
    )


def served_formats(recipe: Recipe, folder: Path) -> dict[str, Any]:
    """Return the formats of an engine that serves the policy in `folder` (EngineSpec: precision, full_precision).

    The folder decides, not the recipe: a later version may have another map than the first. Raises RecipeError for a
    map that does not fit the engine or the model.
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
    """Raise RecipeError if the map names a dtype in which the run's engines do not compute."""
    try:
        file.check_dtype(engine_dtype(recipe))
    except ValueError as error:
        raise RecipeError(f"rollout.quant_map: {error}") from error


def engine_dtype(recipe: Recipe) -> Literal["float32", "bfloat16"]:
    """Return the dtype of activations and unquantized weights. FP8 kernels of a GPU take only 16-bit activations."""
    rollout = recipe.rollout.precision
    exact = recipe.learner.precision == "fp32" and rollout != "bf16" and not (rollout != "fp32" and has_cuda())
    return "float32" if exact else "bfloat16"


_LAUNCHER = "where the launcher puts the engine's hosts"
_SET_FOR_ENGINES: Mapping[str, str] = {
    "--model-path": "model.path",
    "--model": "model.path",
    "--host": "where the role of the engine listens (evenkeel role engine --host)",
    "--port": "rollout.port",
    "--dtype": "learner.precision and rollout.precision",
    "--quantization": "rollout.precision",
    "--tp": "rollout.tensor_parallel",
    "--tp-size": "rollout.tensor_parallel",
    "--tensor-parallel-size": "rollout.tensor_parallel",
    "--context-length": "rollout.context_tokens",
    "--random-seed": "run.seed",
    "--weight-version": "the version that is published",
    "--nnodes": _LAUNCHER,
    "--node-rank": _LAUNCHER,
    "--dist-init-addr": _LAUNCHER,
    "--nccl-init-addr": _LAUNCHER,
    "--preferred-sampling-params": "rollout.temperature, top_p and top_k",
}
"""Argument that Even Keel sets for engines → the setting that decides it."""
_ONE_HOST = "the one host of a teacher that is started (others are named in distillation.urls)"
_SET_FOR_TEACHER: Mapping[str, str] = {
    "--model-path": "distillation.path",
    "--model": "distillation.path",
    "--host": "the loopback address, at which the collector asks the teacher beside it (others: distillation.urls)",
    "--port": "the free port that the collector gives the teacher",
    "--tp": "distillation.tensor_parallel",
    "--tp-size": "distillation.tensor_parallel",
    "--tensor-parallel-size": "distillation.tensor_parallel",
    "--context-length": "rollout.context_tokens",
    "--nnodes": _ONE_HOST,
    "--node-rank": _ONE_HOST,
    "--dist-init-addr": _ONE_HOST,
    "--nccl-init-addr": _ONE_HOST,
}
"""Argument that Even Keel sets for a teacher → the setting that decides it. Formats and sampling are not set."""
_REPLICAS = {"data parallel replicas": DATA_PARALLEL, "pipeline stages": PIPELINE_PARALLEL}
_SPECULATION, _FP32_HEAD, _FILE = "--speculative-algorithm", "--enable-fp32-lm-head", "--config"
_READ = (*DATA_PARALLEL, *PIPELINE_PARALLEL, *OWN_PLACES, _SPECULATION, _FP32_HEAD, _FILE, "--kv-cache-dtype")
"""Arguments that are refused under conditions, here and elsewhere, when written as whole names."""
_SECRETS = ("--api-key", "--admin-api-key", "--ssl-keyfile-password")
_SECRET_ENDINGS = ("-key", "-password", "-secret", "-token")
_NO_SECRETS = ("--ssl-keyfile", "--bucket-time-to-first-token", "--kt-max-deferred-experts-per-token")
"""SGLang's arguments that only look like a secret, or like the beginning of one."""


def gives_secret(argument: str) -> bool:
    """Return whether an argument (`--name[=value]`), whole or shortened, gives a server a secret."""
    name = _argument_name(argument)
    if name is None or name in _NO_SECRETS:
        return False
    begun = any(secret.startswith(name) for secret in _SECRETS)
    return begun or name.startswith("--api-k") or name.endswith(_SECRET_ENDINGS)


def check_extra_args(recipe: Recipe) -> None:
    """Raise RecipeError for arguments of engines or teacher that give a secret or replace what Even Keel sets, and for
    arguments of engines that contradict the recipe or its weight channel."""
    given = recipe.rollout.extra_args
    _check_names("rollout", given, _SET_FOR_ENGINES)
    if recipe.distillation is not None:
        _check_names("distillation", recipe.distillation.extra_args, _SET_FOR_TEACHER)
    if _FP32_HEAD in map(_argument_name, given) and not recipe.model.fp32_lm_head:
        raise RecipeError(
            f"rollout.extra_args has {_FP32_HEAD}, of which the learner knows nothing; set model.fp32_lm_head to true "
            "instead, which both follow"
        )
    if recipe.weights.channel in ("broadcast", "ipc"):
        for what, names in _REPLICAS.items():
            for name in names:
                if (count := option(given, name)) not in (None, "1"):
                    raise RecipeError(
                        f"rollout.extra_args has {name} {count}, but weights.channel {recipe.weights.channel} sends "
                        f"tensors to the tensor parallel ranks of one copy: SGLang takes none into {what}; use more "
                        "rollout.engines or a larger rollout.tensor_parallel, or weights.channel disk"
                    )
    speculation = option(given, _SPECULATION)
    if speculation is not None and recipe.weights.kv_cache == "keep":
        raise RecipeError(
            f"rollout.extra_args has {_SPECULATION} {speculation}, and weights.kv_cache is keep: a step then adds "
            "several tokens, and an engine stopped in place does not say how many of them are of the old weights; "
            "leave it out, or set weights.kv_cache to recompute"
        )


def _check_names(section: str, given: Sequence[str], replaced: Mapping[str, str]) -> None:
    for argument in given:
        if (name := _argument_name(argument)) is None:
            continue
        if gives_secret(argument):
            raise RecipeError(
                f"{section}.extra_args has {name}, and whoever reads the recipe or the processes of the machine would "
                "read that secret; leave it out: engines get the key of EVENKEEL_API_KEY, a teacher that is started "
                "one of its own, and neither has another secret"
            )
        known = (*replaced, *_READ)
        whole = name if name in known else next((one for one in known if one.startswith(name)), None)
        if whole is None:
            continue
        said = name if whole == name else f"{name}, short for {whole}"
        if whole in replaced:
            raise RecipeError(
                f"{section}.extra_args has {said}, which would replace {replaced[whole]}; leave it out, and change "
                "that instead"
            )
        if whole == _FILE:
            raise RecipeError(
                f"{section}.extra_args has {said}, a file whose arguments nobody checks; leave it out, and list them "
                "there"
            )
        if whole != name:
            raise RecipeError(f"{section}.extra_args has {said}; write the whole name, by which the recipe is checked")


def _argument_name(argument: str) -> str | None:
    """Return the name of `--name` or `--name=value`; None for a value."""
    name = argument.partition("=")[0]
    return name if name.startswith("--") and name != "--" else None


def build_fleet(run: RunDirectory, recipe: Recipe, epoch: Epoch | None, on_change: OnChange | None = None) -> Fleet:
    """Return the fleet of the run's engines. `epoch` is of the role that gives weights."""
    return Fleet(run.membership(recipe.rollout.urls), **fleet_settings(run, recipe, epoch, on_change))


def put_to_sleep(run: RunDirectory, recipe: Recipe, epoch: Epoch) -> None:
    """Have the run's engines give up their memory before the learner is built (rollout.colocated)."""

    async def sleep() -> None:
        fleet = build_fleet(run, recipe, epoch)
        try:
            await fleet.put_to_sleep()
        finally:
            await fleet.close()

    asyncio.run(sleep())


def fleet_settings(
    run: RunDirectory, recipe: Recipe, epoch: Epoch | None, on_change: OnChange | None = None
) -> FleetSettings:
    return FleetSettings(
        updates=Updates(run.updates, epoch),
        on_change=on_change,
        api_key=read_api_key(),
        request_deadline_s=recipe.rollout.request_deadline_s,
        load_deadline_s=recipe.weights.publish_deadline_s,
        keeps_kv=recipe.weights.kv_cache == "keep",
        colocated=recipe.rollout.colocated,
    )


def checksums_maker(recipe: Recipe) -> Callable[[], ExpectedChecksums] | None:
    """Return a maker of one version's expected checksums; None on GPUs, whose engines hash by another function."""
    if has_cuda():
        return None
    shape = ModelConfig.from_hf(read_hf_config(recipe.model.path))
    import torch

    from rollout_sglang.weights.expected_checksums import ExpectedChecksums

    return partial(
        ExpectedChecksums,
        dtype=getattr(torch, engine_dtype(recipe)),
        num_kv_heads=shape.num_kv_heads,
        num_experts=0 if shape.experts is None else shape.experts.count,
        tied_embeddings=shape.tied_embeddings,
        tensor_parallel=recipe.rollout.tensor_parallel,
    )

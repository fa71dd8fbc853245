"""Which of SGLang's arguments a recipe may pass to its engines as they are (rollout.extra_args).

They come last on the command line, where the last one wins: one that this program sets itself would replace, without a
word, what the recipe says elsewhere and what the learner, the planner and the checks of weights go by.
"""

from __future__ import annotations

from collections.abc import Mapping

from pipeline.config.recipe import Recipe
from pipeline.errors import RecipeError
from pipeline.server_arguments import DATA_PARALLEL, PIPELINE_PARALLEL, option

_LAUNCHER = "where the launcher puts the engine's hosts"
_SET_HERE: Mapping[str, str] = {
    "--model-path": "model.path",
    "--model": "model.path",
    "--host": "where the role of the engine listens (evenkeel role engine --host)",
    "--port": "rollout.port",
    "--api-key": "EVENKEEL_API_KEY",
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
"""Argument → what says it instead."""
_REPLICAS = {"data parallel replicas": DATA_PARALLEL, "pipeline stages": PIPELINE_PARALLEL}
_SPECULATION = "--speculative-algorithm"


def check_extra_args(recipe: Recipe) -> None:
    """Raises RecipeError for arguments that contradict the recipe, or that its way of giving weights cannot work
    with."""
    given = recipe.rollout.extra_args
    names = [argument.partition("=")[0] for argument in given if argument.startswith("--")]
    for name in names:
        if name in _SET_HERE:
            raise RecipeError(
                f"rollout.extra_args has {name}, which would replace {_SET_HERE[name]}; leave it out, and change that "
                "instead"
            )
    if "--enable-fp32-lm-head" in names and not recipe.model.fp32_lm_head:
        raise RecipeError(
            "rollout.extra_args has --enable-fp32-lm-head, of which the learner knows nothing; set model.fp32_lm_head "
            "to true instead, which both follow"
        )
    if recipe.weights.channel in ("broadcast", "ipc"):
        _check_one_replica(recipe)
    speculation = option(given, _SPECULATION)
    if speculation is not None and recipe.weights.kv_cache == "keep":
        raise RecipeError(
            f"rollout.extra_args has {_SPECULATION} {speculation}, and weights.kv_cache is keep: a step then adds "
            "several tokens, and an engine stopped in place does not say how many of them are of the old weights; "
            "leave it out, or set weights.kv_cache to recompute"
        )


def _check_one_replica(recipe: Recipe) -> None:
    channel = recipe.weights.channel
    for what, names in _REPLICAS.items():
        for name in names:
            if (count := option(recipe.rollout.extra_args, name)) not in (None, "1"):
                raise RecipeError(
                    f"rollout.extra_args has {name} {count}, but weights.channel {channel} sends tensors to the tensor "
                    f"parallel ranks of one copy: SGLang takes none into {what}; use more rollout.engines or a larger "
                    "rollout.tensor_parallel, or weights.channel disk"
                )

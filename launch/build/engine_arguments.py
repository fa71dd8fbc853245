"""Which of SGLang's arguments a recipe may pass as they are: to engines (rollout.extra_args), to the teacher's server
(distillation.extra_args).

They come last on the command line, where the last one wins: one that this program sets itself would replace, without a
word, what the recipe says elsewhere and what the learner, the planner and the checks of weights go by. SGLang takes the
beginning of a name for the name, so that beginnings are refused, too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pipeline.config.recipe import Recipe
from pipeline.errors import RecipeError
from pipeline.server_arguments import DATA_PARALLEL, OWN_PLACES, PIPELINE_PARALLEL, option

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
"""Argument → what says it instead."""
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
"""The same of the teacher's server. No key says in which formats it computes, and it samples nothing."""
_REPLICAS = {"data parallel replicas": DATA_PARALLEL, "pipeline stages": PIPELINE_PARALLEL}
_SPECULATION, _FP32_HEAD, _FILE = "--speculative-algorithm", "--enable-fp32-lm-head", "--config"
_READ = (*DATA_PARALLEL, *PIPELINE_PARALLEL, *OWN_PLACES, _SPECULATION, _FP32_HEAD, _FILE, "--kv-cache-dtype")
"""Arguments that are refused under conditions, here and elsewhere, by their whole names."""
_SECRETS = ("--api-key", "--admin-api-key", "--ssl-keyfile-password")
_SECRET_ENDINGS = ("-key", "-password", "-secret", "-token")
_NO_SECRETS = ("--ssl-keyfile", "--bucket-time-to-first-token", "--kt-max-deferred-experts-per-token")
"""SGLang's arguments that only look like a secret, or like the beginning of one."""


def gives_secret(argument: str) -> bool:
    """Whether an argument, `--name` or `--name=value`, gives a server a key, a password or a token: by its name, or by
    one that SGLang takes for such a name."""
    name = _name(argument)
    if name is None or name in _NO_SECRETS:
        return False
    begun = any(secret.startswith(name) for secret in _SECRETS)
    return begun or name.startswith("--api-k") or name.endswith(_SECRET_ENDINGS)


def check_extra_args(recipe: Recipe) -> None:
    """Raises RecipeError for arguments of the engines or of the teacher that give a secret, or that replace what the
    program sets; and for those of the engines that contradict the recipe, or that its way of giving weights cannot work
    with."""
    given = recipe.rollout.extra_args
    _check_names("rollout", given, _SET_FOR_ENGINES)
    if recipe.distillation is not None:
        _check_names("distillation", recipe.distillation.extra_args, _SET_FOR_TEACHER)
    if _FP32_HEAD in map(_name, given) and not recipe.model.fp32_lm_head:
        raise RecipeError(
            f"rollout.extra_args has {_FP32_HEAD}, of which the learner knows nothing; set model.fp32_lm_head to true "
            "instead, which both follow"
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


def _check_names(section: str, given: Sequence[str], replaced: Mapping[str, str]) -> None:
    for argument in given:
        if (name := _name(argument)) is None:
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


def _name(argument: str) -> str | None:
    """Of `--name` and `--name=value`; None of a value."""
    name = argument.partition("=")[0]
    return name if name.startswith("--") and name != "--" else None


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

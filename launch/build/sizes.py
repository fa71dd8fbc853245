"""Check a recipe against the sizes in its model's config.json, and count parameters and bytes. Loads no torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from typing import Any

from megatron_bridge.hf.model_config import ModelConfig
from megatron_bridge.parallel.layout import check_layout, check_longest_sample
from pipeline.config.algorithm import check_mixture
from pipeline.config.recipe import Recipe
from pipeline.errors import FatalError, RecipeError
from rollout_sglang.server.capacity import check_block_shapes

HfConfig = Mapping[str, Any]


def refusals(config: HfConfig, recipe: Recipe) -> Iterator[FatalError]:
    """Yield every error of the recipe that the sizes in the model's config.json show. Raises ModelError for a model
    that the learner does not support."""
    rollout, shape = recipe.rollout, ModelConfig.from_hf(config)
    checks: tuple[Callable[[], None], ...] = (
        lambda: check_layout(config, recipe.learner),
        lambda: check_longest_sample(recipe.learner, rollout.context_tokens),
        lambda: check_block_shapes(config, rollout.tensor_parallel) if rollout.precision == "fp8_block" else None,
        lambda: check_mixture(rollout.quantized_format, experts=shape.experts is not None),
    )
    for check in checks:
        try:
            check()
        except FatalError as error:
            yield error
    if rollout.context_tokens > shape.max_positions:  # SGLang would not start
        yield RecipeError(
            f"rollout.context_tokens is {rollout.context_tokens}, but {recipe.model.path} takes {shape.max_positions} "
            "tokens at most (max_position_embeddings of its config.json); lower rollout.context_tokens"
        )


def checkpoint_bytes(config: ModelConfig, recipe: Recipe) -> int:
    """Return a checkpoint's bytes: parameters, float32 copies if they are 16-bit, two moments, kept versions."""
    size = recipe.learner.parameter_bytes
    return config.num_parameters * (size + (0 if size == 4 else 4) + 8 + recipe.num_kept_versions * size)


@lru_cache(maxsize=32)
def layer_sizes(config: ModelConfig) -> dict[str, int]:
    """Return name within a decoder layer → number of parameters, all experts under one name. All layers are alike."""
    sizes: dict[str, int] = {}
    for name, size in config.tensors().items():
        if not name.startswith("model.layers.0."):
            continue
        short = name.removeprefix("model.layers.0.")
        if ".experts." in short:
            short = "mlp.experts." + short.split(".", 3)[3]
        sizes[short] = sizes.get(short, 0) + math.prod(size)
    return sizes


def active_parameters(config: ModelConfig) -> int:
    """Return the parameters used for each position: all but the embedding, and only the experts that it visits."""
    total = config.vocab_size * config.hidden_size
    for name, number in layer_sizes(config).items():
        if ".experts" in name and config.experts is not None:
            total += config.num_layers * number * config.experts.per_token // config.experts.count
        else:
            total += config.num_layers * number
    return total

"""What a recipe asks of its model and config.json alone refuses. One list, for `train` before anything is started, and
for `plan` and the launchers. Loads no torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from megatron_bridge.hf.model_config import ModelConfig
from megatron_bridge.parallel.layout_checks import check_layout, check_longest_sample
from pipeline.config.formats import check_mixture
from pipeline.config.recipe import Recipe
from pipeline.errors import FatalError, RecipeError
from rollout_sglang.server.block_shapes import check_block_shapes

HfConfig = Mapping[str, Any]


def check_sizes(config: HfConfig, recipe: Recipe) -> None:
    """Raises FatalError when the sizes in the model's config.json refuse the recipe."""
    for refused in refusals(config, recipe):
        raise refused


def refusals(config: HfConfig, recipe: Recipe) -> Iterator[FatalError]:
    """Every reason for which they do."""
    for check in _CHECKS:
        try:
            check(config, recipe)
        except FatalError as error:
            yield error


def _check_layout(config: HfConfig, recipe: Recipe) -> None:
    check_layout(config, recipe.learner)


def _check_longest_sample(_: HfConfig, recipe: Recipe) -> None:
    check_longest_sample(recipe.learner, recipe.rollout.context_tokens)


def _check_block_shapes(config: HfConfig, recipe: Recipe) -> None:
    if recipe.rollout.precision == "fp8_block":
        check_block_shapes(config, recipe.rollout.tensor_parallel)


def _check_positions(config: HfConfig, recipe: Recipe) -> None:
    """SGLang does not start with a longer context than the model has positions for."""
    positions = ModelConfig.from_hf(config).max_positions
    if recipe.rollout.context_tokens > positions:
        raise RecipeError(
            f"rollout.context_tokens is {recipe.rollout.context_tokens}, but {recipe.model.path} takes {positions} "
            "tokens at most (max_position_embeddings of its config.json); lower rollout.context_tokens"
        )


def _check_mixture(config: HfConfig, recipe: Recipe) -> None:
    check_mixture(recipe.rollout.quantized_format, experts=ModelConfig.from_hf(config).experts is not None)


_CHECKS: tuple[Callable[[HfConfig, Recipe], None], ...] = (
    _check_layout,
    _check_longest_sample,
    _check_block_shapes,
    _check_positions,
    _check_mixture,
)

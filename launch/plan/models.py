"""Sizes of a model that is planned with: no weights are read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from launch.plan.footprint import layer_sizes
from megatron_bridge.hf.model_config import ModelConfig, read_config
from pipeline.config.loader import SHIPPED
from pipeline.errors import ModelError
from rollout_sglang.server.capacity import EngineModel


def config_for(recipe_path: Path, model_path: Path) -> dict[str, Any]:
    """config.json of the model: `model_path` as training would find it, or else the sizes that lie beside the recipe or
    the shipped ones, for a model that has yet to be made or fetched. Raises ModelError."""
    places = [model_path]
    if not model_path.is_absolute():
        for folder in (recipe_path.parent, SHIPPED):
            places += [folder / model_path, folder / "models" / model_path.name]
    for place in places:
        if (place / "config.json").is_file():
            return read_config(place)
    tried = " or ".join(str(place / "config.json") for place in {place.resolve(): place for place in places}.values())
    raise ModelError(f"no config.json at {tried}; give a model folder: --set model.path=… (no weights are needed)")


def engine_model(config: ModelConfig) -> EngineModel:
    """What an engine's memory depends on: the projections of the layers are what FP8 rollouts quantize."""
    linear = config.num_layers * sum(size for name, size in layer_sizes(config).items() if name.endswith("proj.weight"))
    return EngineModel(
        num_layers=config.num_layers,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        linear=linear,
        other=config.num_parameters - linear,
    )

"""Known faults of engines, each made in the learner: what would it do to every token? (precision.mismatch.localization)

    full:GROUP      the engine holds these stacked modules without quantizing them, though the map says it does
    quantized:GROUP the other way round
    full:all        nothing is quantized
    format:FORMAT   … all are in the other FP8 format that engines serve
    weights_only    the weights are quantized, what they are multiplied with is not
    scale:MODULE    the module's weights are all too large, or too small, by one factor
    bf16:MODULE     the module's weights are rounded to bfloat16
    former          the engine holds the weights of an earlier version

An effect is log pi_right - log pi_faulty of each token, nats: what the kernels term is when the engine has that fault.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from launch.mismatch.scoring import MOST_MODULES
from megatron_bridge.hf.tensor_folder import TensorFolder
from megatron_bridge.learner import MegatronLearner
from megatron_bridge.step.changed_weights import NamedTensors, changed, rounded, scaled
from megatron_bridge.step.fp8_emulation import emulated
from megatron_bridge.weights.name_map import NameMap
from precision.formats.quant_map import QuantMap
from precision.formats.rollout_format import RolloutFormat
from precision.formats.streams import fake_quantize_state
from precision.mismatch.localization import TRIED_SCALE
from precision.mismatch.sensitivity import whole_layers

EMBEDDING, HEAD = "model.embed_tokens", "lm_head"

Scores = NDArray[np.float64]
Score = Callable[[], Scores]


def effects(learner: MegatronLearner, score: Score, quant: QuantMap | None, former: Path | None) -> dict[str, Scores]:
    """Fault → [tokens] its effect; `score()` gives log-probabilities [tokens] of the learner as it is at that moment.
    `former` is an HF folder of an earlier version. Collective."""
    with _as_engine(learner, quant):
        right = score()

    def with_weights(change: Callable[[NamedTensors], NamedTensors]) -> Scores:
        with changed(learner, change), _as_engine(learner, quant):
            return right - score()

    found = {f"scale:{module}": with_weights(scaled(module, TRIED_SCALE)) for module in _modules(learner)}
    if not learner.model_config.tied_embeddings:
        found[f"bf16:{HEAD}"] = with_weights(rounded(HEAD, torch.bfloat16))
    if former is not None:
        folder = TensorFolder(former)
        found["former"] = with_weights(lambda _: folder.tensors())
    return found | {name: right - other for name, other in _formats(learner, score, quant)}


def _as_engine(learner: MegatronLearner, quant: QuantMap | None) -> AbstractContextManager[None]:
    return emulated(learner, quant if quant is not None and quant.formats else None)


def _formats(learner: MegatronLearner, score: Score, quant: QuantMap | None) -> Iterator[tuple[str, Scores]]:
    """Scores with another map than the run's."""
    if quant is None or quant.rollout_format is None:
        return
    for fault, other in _other_maps(quant, quant.rollout_format):
        with _as_engine(learner, other):
            yield fault, score()
    with changed(learner, lambda tensors: fake_quantize_state(tensors, quant)), emulated(learner, None):
        yield "weights_only", score()


def _other_maps(quant: QuantMap, usual: RolloutFormat) -> Iterator[tuple[str, QuantMap]]:
    yield "full:all", quant.only(())
    by_layer = len(quant.fused_groups) > MOST_MODULES
    groups = {layer.name: layer.modules for layer in whole_layers(quant)} if by_layer else quant.groups
    for name, modules in groups.items():
        if any(module in quant.formats for module in modules):
            yield f"full:{name}", quant.promoted(modules)
        else:
            yield f"quantized:{name}", quant.promoted(modules, to=usual)
    for other in RolloutFormat:  # in one order on all ranks: a set has another in each process
        if other.is_served and not other.is_emulated and other is not usual:
            yield f"format:{other}", quant.promoted(quant.formats, to=other)


def _modules(learner: MegatronLearner) -> list[str]:
    """Each linear module of the whole model; each layer where there are many."""
    sizes = NameMap(learner.model_config).tensors
    modules = [name.removesuffix(".weight") for name, size in sizes.items() if len(size) > 1]
    modules = [module for module in modules if module != EMBEDDING]
    if len(modules) > MOST_MODULES:
        modules = list(dict.fromkeys(re.sub(r"(\.layers\.\d+)\..*", r"\1", module) for module in modules))
    return modules

"""Attributions made of numbers whose terms are known, for what reads them: findings, pages."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from pipeline.analysis.mismatch import EngineCheck, Measured, Setting
from precision.mismatch.attribution import TERMS, TokenScores

TOKENS = 4000
SIZES = {"staleness": 0.0, "quantization": 0.02, "kernels": 1e-6, "decoding": 1e-6}
"""Standard deviation of each term, nats, where a test says nothing else."""


def setting(**changes: Any) -> Setting:
    """Of fresh fp8_block rollouts with a float32 learner."""
    usual: dict[str, Any] = dict(
        source="demo",
        kind="fresh",
        rollout_precision="fp8_block",
        learner_precision="fp32",
        engine_dtype="float32",
        temperature=1.0,
        sampled_at=1.0,
        versions=(0,),
    )
    return Setting(**(usual | changes))


def measured(
    sizes: dict[str, float] | None = None,
    *,
    effects: dict[str, float] | None = None,
    tempered: float = 0.0,
    audit: EngineCheck | None = None,
    prefilled: bool = True,
    **changes: Any,
) -> Measured:
    """Terms of the given sizes, random by token. `effects` are faults and how many times each is in the kernels term;
    `tempered` is how far the sampling temperature lies above the learner's. Without `prefilled` the engine
    did not score what it sampled."""
    draw = np.random.default_rng(0)
    sizes = SIZES | (sizes or {})
    entropy = draw.gamma(1.0, 0.5, TOKENS)
    plain = -draw.exponential(entropy + 0.02)
    faults = {name: 0.02 * draw.standard_normal(TOKENS) for name in effects or {}}
    term = {name: sizes.get(name, 0.0) * draw.standard_normal(TOKENS) for name in TERMS}
    term["kernels"] += sum((amount * faults[name] for name, amount in (effects or {}).items()), np.zeros(TOKENS))
    quantized = plain - term["quantization"]
    term["decoding"] += tempered * (quantized + entropy)
    prefill = quantized - term["kernels"]
    has_formats = sizes["quantization"] > 0

    def tensor(values: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(values)

    return Measured(
        setting=setting(**changes),
        scores=TokenScores(
            now=tensor(plain + term["staleness"]),
            then=tensor(plain),
            quantized=tensor(quantized) if has_formats else None,
            prefill=tensor(prefill) if prefilled else None,
            decode=tensor(prefill - term["decoding"]),
        ),
        position=np.arange(TOKENS) % 14,
        entropy=entropy,
        layer_steps={0: plain - 0.4 * term["quantization"], 1: quantized} if has_formats else {},
        searched=np.ones(TOKENS, np.bool_),
        effects=faults,
        audit=audit or EngineCheck(compared=30, differing=()),
    )

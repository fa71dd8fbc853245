"""Log-probabilities of sampled tokens, learner against engine; and how well emulation foretells the gap of FP8.

    learner / engine      bf16 / bf16     bf16 / fp8_block     fp8_block / fp8_block

KL is the k3 estimate of KL(engine ‖ learner), the mean of ρ − 1 − log ρ over tokens that the engine sampled. The gap of
an FP8 engine is split as log π − log π_engine = [log π − log π_Q] + [log π_Q − prefill] + [prefill − decode], where
π_Q is the BF16 learner on Megatron's own layers with the engine's formats emulated: quantization, kernels, decoding.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.gpu.check import Figures, Goal, Scale

NAME = "parity"
AFTER = ("stack.imports", "stack.engine")
PAIRS = ("bf16_bf16", "bf16_fp8", "fp8_fp8")
"""learner_engine"""
PARTS = ("bf16", "fp8")
"""An engine each, for all the learners that it is paired with."""
ENGINE_ARGS = ("--mem-fraction-static=0.8",)
"""Of what is free when it starts: lanes beside it take memory until it has its own, which --max-total-tokens caps."""
PRECISIONS = {"bf16": "bf16", "fp8": "fp8_block"}
DEADLINE_S = 300.0


def _goals() -> tuple[Goal, ...]:
    goals = [Goal(figure="bf16_bf16_k3", what="BF16 learner, BF16 engine: mean k3 KL", unit="nats", below=1e-3)]
    goals += [Goal(figure=f"{part}_k3", what=f"{part}: mean k3 KL", unit="nats") for part in PAIRS[1:]]
    for part in PAIRS:
        goals += [
            Goal(figure=f"{part}_mean_gap", what=f"{part}: mean |gap|", unit="nats"),
            Goal(figure=f"{part}_max_gap", what=f"{part}: largest |gap|", unit="nats"),
            Goal(figure=f"{part}_ess", what=f"{part}: effective sample size"),
            Goal(figure=f"{part}_decoding", what=f"{part}: mean |prefill − decode|", unit="nats"),
        ]
    goals += [
        Goal(figure="bf16_fp8_predicted", what="FP8's mean |gap| as the emulation foretells it", unit="nats"),
        Goal(figure="bf16_fp8_predicted_over_measured", what="foretold ÷ measured"),
        Goal(figure="bf16_fp8_closed_share", what="share of the gap that emulation closes"),
        Goal(figure="bf16_fp8_kernels", what="bf16_fp8: mean |emulation − prefill|", unit="nats"),
    ]
    return tuple(goals)


GOALS = _goals()


def run(scale: Scale) -> Figures:
    from launch.verify.parity import Engine, prepare
    from tests.gpu.engines import engine_recipe, prompts_of, sampled_rows
    from tests.gpu.models import shared_model

    theirs, model = PRECISIONS[scale.part], shared_model(scale, "0.6b")
    recipe = engine_recipe(scale, model, theirs, "bf16", ENGINE_ARGS)
    vocabulary = json.loads((model / "config.json").read_text())["vocab_size"]
    with Engine(prepare(recipe), recipe) as engine:
        count, length, samples, new_tokens = scale.of((32, 64, 4, 64), (8, 16, 2, 16))
        rows = sampled_rows(engine, prompts_of(vocabulary, count, length), samples, new_tokens)
        prefilled = asyncio.run(engine.prefill(rows.tokens))
    budget = recipe.learner.micro_batch_tokens
    decoded, prefill = joined(rows.sampled), responses(rows, prefilled)
    for pair in (pair for pair in PAIRS if pair.endswith(f"_{scale.part}")):
        ours = PRECISIONS[pair.split("_")[0]]
        if ours != "bf16":
            scale.needs_transformer_engine()
        (plain,) = score(model, rows.tokens, precision=ours, micro_batch_tokens=budget)
        found = gaps(responses(rows, plain), decoded) | {"decoding": mean_gap(prefill, decoded)}
        if pair == "bf16_fp8":
            found |= emulation(scale, model, rows, prefill, decoded, budget)
        scale.keep(**{f"{pair}_{name}": value for name, value in found.items()})
    return {}


def score(model: Path, rows: Sequence[Sequence[int]], quant: Any = None, **section: Any) -> list[Any]:
    """[learner's log-probabilities by row] at `section`; with a quant map on Megatron's layers, and again emulated."""
    from megatron_bridge.step.fp8_emulation import emulated
    from tests.gpu.learners import learner

    with learner(model, layers=None if quant is None else "megatron", **section) as subject:
        found = [subject.score_tokens(rows)]
        if quant is not None:
            with emulated(subject, quant):
                found.append(subject.score_tokens(rows))
    return found


def emulation(scale: Scale, model: Path, rows: Any, prefill: Any, decoded: Any, budget: int) -> Figures:
    """What the emulating learner says of the engine's gap, before any engine is asked."""
    from launch.build.components import build_quant_map
    from tests.gpu.engines import engine_recipe

    quant = build_quant_map(engine_recipe(scale, model, "fp8_block", "bf16"))
    plain, quantized = (
        responses(rows, found)
        for found in score(model, rows.tokens, quant, precision="bf16", micro_batch_tokens=budget)
    )
    measured, foretold = mean_gap(plain, decoded), mean_gap(plain, quantized)
    return {
        "predicted": foretold,
        "predicted_over_measured": foretold / measured,
        "closed_share": 1.0 - mean_gap(quantized, decoded) / measured,
        "kernels": mean_gap(quantized, prefill),
    }


def responses(rows: Any, scored: Sequence[Any]) -> Any:
    """[sampled tokens] of arrays that hold tokens 1 … n-1 of each row."""
    return joined([row[len(prompt) :] for row, prompt in zip(scored, rows.prompt, strict=True)])


def joined(arrays: Sequence[Any]) -> Any:
    """float64 [tokens]"""
    import numpy as np
    import torch

    return torch.from_numpy(np.concatenate([np.asarray(one, np.float64) for one in arrays]))


def mean_gap(one: Any, other: Any) -> float:
    """Mean |difference|, nats."""
    return float((one - other).abs().mean())


def gaps(learner: Any, engine: Any) -> Figures:
    """k3, mean_gap, max_gap and ess over the sampled tokens."""
    from precision.mismatch.statistics import gap

    found = gap(learner, engine)
    return {"k3": found.k3, "mean_gap": found.mean_abs, "max_gap": found.max_abs, "ess": found.ess}

"""`convert … --verify`: both sides of a conversion compute log-probabilities of the same random token rows, in float32.

    HF ⇄ Megatron  transformers on the HF folder | the learner on the checkpoint: at most 1e-3 nats apart
    FP8            transformers on the dequantized folder, activations quantized as the engine does | the learner on
                   the source, emulating the formats: a mean gap of at most 10 % of the plain learner's

An activation on the border of two e4m3 values may fall either way, hence the mean for FP8. Loads the model whole.
"""

from __future__ import annotations

import json
import math
import random
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from launch.convert.jobs import run_job
from launch.convert.sources import fp8_map
from launch.run.processes import run_child
from megatron_bridge.hf.headers import tensor_headers
from megatron_bridge.hf.model_config import ModelConfig, read_config
from pipeline.child_process import die_with_parent
from pipeline.config.recipe import LearnerSection
from pipeline.data.run_directory import RunDirectory
from pipeline.errors import ModelError

NUM_ROWS, ROW_TOKENS = 4, 48
LARGEST_GAP_NATS = 1e-3
"""A tensor in the wrong place costs tenths of a nat; float32 in another order about 1e-5."""
OPEN_SHARE = 0.1

Scores = list[NDArray[np.float32]]


def verify_megatron(hf: Path, checkpoint: Path) -> dict[str, Any]:
    """Compare an HF folder with a checkpoint of the same weights. Raises ModelError when they disagree."""
    gaps = _run(dict(kind="megatron", hf=str(hf.resolve()), checkpoint=str(checkpoint.resolve())), hf)
    if gaps["max_gap_nats"] > LARGEST_GAP_NATS:
        raise ModelError(
            f"log-probabilities of {hf} and {checkpoint} differ by up to {gaps['max_gap_nats']:.3g} nats, expected at "
            f"most {LARGEST_GAP_NATS:g}; do not use the result"
        )
    return {**gaps, "allowed_nats": LARGEST_GAP_NATS}


def verify_fp8(source: Path, folder: Path, layout: str) -> dict[str, Any]:
    """Compare an FP8 folder with the learner that emulates its formats. Raises ModelError when they disagree."""
    if ModelConfig.from_hf(read_config(source)).experts is not None:
        raise ModelError("--verify of an FP8 folder knows dense models only; the folder was written and compared")
    gaps = _run(dict(kind="fp8", hf=str(source.resolve()), folder=str(folder.resolve()), layout=layout), source)
    if gaps["mean_gap_emulated_nats"] > OPEN_SHARE * gaps["mean_gap_plain_nats"]:
        raise ModelError(
            f"the learner's emulation of {folder} is off by {gaps['mean_gap_emulated_nats']:.3g} nats in the mean, "
            f"expected at most {OPEN_SHARE:.0%} of the unquantized learner's {gaps['mean_gap_plain_nats']:.3g}; "
            "do not use the result"
        )
    return {**gaps, "allowed_share": OPEN_SHARE}


def _run(job: dict[str, Any], hf: Path) -> dict[str, Any]:
    num_bytes = 4 * sum(math.prod(header.shape) for header in tensor_headers(hf).values())
    return run_job("launch.convert.verify", job, 1, num_bytes)


def score_both(run: RunDirectory) -> None:
    """Body of the one rank: writes result.json."""
    job = json.loads((run.path / "job.json").read_text(encoding="utf-8"))
    hf_config = read_config(Path(job["hf"]))
    rows = random_rows(hf_config)
    learner = _learner(Path(job["hf"]))
    if job["kind"] == "megatron":
        result = _score_megatron(learner, Path(job["hf"]), Path(job["checkpoint"]), rows)
    else:
        result = _score_fp8(learner, hf_config, Path(job["folder"]), job["layout"], rows)
    (run.path / "result.json").write_text(json.dumps(result), encoding="utf-8")


def random_rows(hf_config: dict[str, Any]) -> list[list[int]]:
    """The same token rows in every call."""
    generator = random.Random(0)
    length = min(ROW_TOKENS, int(hf_config["max_position_embeddings"]))
    return [[generator.randrange(hf_config["vocab_size"]) for _ in range(length)] for _ in range(NUM_ROWS)]


def _learner(hf: Path) -> Any:
    from megatron_bridge.learner import MegatronLearner
    from precision.supervised import Supervised

    return MegatronLearner.create(
        hf, LearnerSection(precision="fp32"), Supervised(), temperature=1.0, seed=0, total_steps=1
    )


def _score_megatron(learner: Any, hf: Path, checkpoint: Path, rows: list[list[int]]) -> dict[str, Any]:
    import torch

    from megatron_bridge.checkpoint import weights_only

    chunks = [chunk.module for chunk in learner.model]
    with torch.no_grad():
        for parameter in (p for chunk in chunks for p in chunk.parameters()):
            parameter.fill_(float("nan"))  # what the checkpoint does not fill must not go unnoticed
    weights_only.load(checkpoint, chunks)
    ours, theirs = learner.score_tokens(rows), transformers_scores(hf, None, rows)
    return dict(max_gap_nats=float(_gaps(ours, theirs).max()), tokens=len(_gaps(ours, theirs)))


def _score_fp8(
    learner: Any, hf_config: dict[str, Any], folder: Path, layout: Any, rows: list[list[int]]
) -> dict[str, Any]:
    from megatron_bridge.step.fp8_emulation import emulated

    quant = fp8_map(hf_config, learner.model_config, layout)
    plain = learner.score_tokens(rows)
    with emulated(learner, quant):
        ours = learner.score_tokens(rows)
    theirs = transformers_scores(folder, quant, rows)
    return dict(
        mean_gap_emulated_nats=float(_gaps(ours, theirs).mean()),
        max_gap_emulated_nats=float(_gaps(ours, theirs).max()),
        mean_gap_plain_nats=float(_gaps(plain, theirs).mean()),
        tokens=len(_gaps(ours, theirs)),
    )


def transformers_scores(folder: Path, quant: Any, rows: Sequence[Sequence[int]]) -> Scores:
    """[n - 1] log-probabilities of each row of n tokens; with a quant map, of a stored FP8 folder."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    hf_config = AutoConfig.from_pretrained(folder)
    if quant is None:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    else:
        model = _dequantized_model(hf_config, folder, quant)
    model.eval()
    scores = []
    with torch.no_grad():
        for row in rows:
            tokens = torch.tensor([list(row)])
            logprobs = torch.log_softmax(model(tokens).logits[0, :-1].float(), -1)
            scores.append(logprobs.gather(1, tokens[0, 1:, None])[:, 0].numpy())
    return scores


def _dequantized_model(hf_config: Any, folder: Path, quant: Any) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    from megatron_bridge.hf.fp8 import dequantized_tensors

    del hf_config.quantization_config
    model = AutoModelForCausalLM.from_config(hf_config, dtype=torch.float32)
    left = model.load_state_dict(dict(dequantized_tensors(folder, torch.float32)), strict=False)
    if left.unexpected_keys or set(left.missing_keys) - {"lm_head.weight"}:
        raise ModelError(f"{folder} does not fill the model of its config.json: {left}")
    model.tie_weights()
    for module, rollout_format in quant.formats.items():
        model.get_submodule(module).register_forward_pre_hook(_quantize_input(rollout_format))
    return model


def _quantize_input(rollout_format: Any) -> Callable[[Any, tuple[Any, ...]], tuple[Any, ...]]:
    from precision.formats.by_format import fake_quantize_activation_as

    return lambda _, inputs: (fake_quantize_activation_as(inputs[0], rollout_format), *inputs[1:])


def _gaps(ours: Scores, theirs: Scores) -> NDArray[np.float64]:
    pairs = zip(ours, theirs, strict=True)
    gaps = np.concatenate([np.abs(np.asarray(a, np.float64) - b) for a, b in pairs])
    if not np.isfinite(gaps).all():
        raise ModelError("log-probabilities are not finite: the weights are damaged; do not use the result")
    return gaps


if __name__ == "__main__":
    die_with_parent()
    directory = RunDirectory(Path(sys.argv[1]))
    run_child(directory, "verification", lambda: score_both(directory))

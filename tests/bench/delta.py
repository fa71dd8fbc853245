"""How much of a published policy one update changes, and what writing only that takes. Prints ratios.

A real learner (BF16, AdamW, one process) takes steps at a learning rate; after each the weights are published in a
format, compared with what was published before (megatron_bridge.weight_sync.deltas), and applied to a replica
of it (pipeline.data.deltas), which must then be what a full publish would hold, byte for byte. The first steps, in
which AdamW's moments settle, are left out. Numbers are medians of the other steps.

    density    numbers that changed ÷ all numbers
    share      bytes of the delta ÷ bytes of all tensors
    a change   bytes of the delta for each number that changed
    encode     seconds of comparing and packing ÷ seconds of a copy of all bytes in memory
    apply      seconds of unpacking and overwriting ÷ the same

The model is random, and smaller than any that one would publish so. The density does not follow its size: AdamW moves a
weight by about the learning rate, whatever its gradient, and what that changes depends on the weight's magnitude (0.02
here, as in models of a few billion parameters).
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from launch.convert.new_model import new_model
from megatron_bridge.learner import MegatronLearner
from megatron_bridge.parallel.layout import leave_layout
from megatron_bridge.weight_sync.delta import PublishedShare
from pipeline.config.recipe import LearnerSection, OptimizerSection
from pipeline.data.deltas import Delta, DeltaWriter
from precision.formats.quant_map import QuantMap, QuantMapFile
from precision.formats.streams import quantize_state
from precision.objectives.p3o import P3O
from tests.bench.figures import medians, seconds, tell
from tests.bench.learner import make_batch

RATES = (1e-6, 1e-5, 1e-4)
FORMATS = ("bf16", "fp8_block")
STEPS, SETTLING = 24, 8
SIZES = dict(hidden=512, layers=4, heads=8, kv_heads=4, head_dim=64, ffn=1536)


def _arrays(share: PublishedShare) -> dict[str, Any]:
    return {name: tensor.flatten().view(torch.uint8).numpy() for name, tensor in share.tensors.items()}


def measure(folder: Path, rate: float) -> dict[str, dict[str, float]]:
    """Format → medians, at one learning rate; both formats publish the same weights."""
    optimizer = OptimizerSection(lr=rate, warmup_steps=0)
    section = LearnerSection(precision="bf16", micro_batch_tokens=4096, optimizer=optimizer)
    learner = MegatronLearner.create(folder, section, P3O(), temperature=1.0, seed=0, total_steps=STEPS)
    try:
        followed = {name: _Followed(learner, name) for name in FORMATS}
        found: dict[str, list[dict[str, float]]] = {name: [] for name in FORMATS}
        for step in range(STEPS):
            batch = make_batch(learner.model_config.vocab_size, prompts=2, lengths=(16, 48), seed=step)
            advantages = (batch.reward - batch.reward.mean()).astype(np.float32)
            learner.update(batch, advantages, learner.logprobs(batch))
            for name, one in followed.items():
                measured = one.publish(step)
                if step >= SETTLING:
                    found[name].append(measured)
    finally:
        leave_layout()
    return {name: medians(steps) for name, steps in found.items()}


class _Followed:
    """One format: what a sender remembers, and a replica that only gets deltas."""

    def __init__(self, learner: MegatronLearner, name: str) -> None:
        self._learner = learner
        self._quant = None
        if name == "fp8_block":
            self._quant = QuantMap.from_file(QuantMapFile(base="fp8_block"), learner.model_config.num_layers, None)
        self._sender, self._full = PublishedShare(), PublishedShare()
        self._sender.take(self._stream(), None)
        self._replica = {name: tensor.copy() for name, tensor in _arrays(self._sender).items()}

    def publish(self, step: int) -> dict[str, float]:
        """One version; raises AssertionError unless the replica is what a full publish holds."""
        with tempfile.TemporaryDirectory(prefix="evenkeel-bench-") as scratch:
            writer, before = DeltaWriter(Path(scratch), 0), _arrays(self._sender)
            self._full.take(self._stream(), None)
            full = _arrays(self._full)
            encode_s = seconds(
                lambda: [writer.add(n, before[n], full[n], self._full.tensors[n].itemsize) for n in full]
            )
            delta = Delta(version=step + 1, base=step, base_state="", widths=writer.widths, payloads=writer.payloads)
            apply_s = seconds(lambda: [delta.overwrite(Path(scratch), n, self._replica[n]) for n in full])
        for name, expected in full.items():
            np.testing.assert_array_equal(self._replica[name], expected, err_msg=name)
        copy_s = seconds(lambda: [tensor.copy() for tensor in full.values()])
        self._sender, self._full = self._full, self._sender
        return dict(
            density=writer.num_changed / sum(one.numel() for one in self._sender.tensors.values()),
            share=writer.num_bytes / sum(one.nbytes for one in self._sender.tensors.values()),
            bytes_a_change=writer.num_bytes / max(1, writer.num_changed),
            encode=encode_s / copy_s,
            apply=apply_s / copy_s,
        )

    def _stream(self) -> Iterator[tuple[str, Tensor]]:
        weights = self._learner.named_weights()
        return weights if self._quant is None else quantize_state(weights, self._quant)


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="evenkeel-bench-") as scratch:
        folder = Path(scratch) / "model"
        new_model(folder, **SIZES)
        found = {rate: measure(folder, rate) for rate in RATES}
    tell(found)


if __name__ == "__main__":
    main()

"""HF → Megatron → HF at every layout of four ranks."""

from __future__ import annotations

import json
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import load_file

from megatron_bridge.hf.model_config import ModelConfig, read_hf_config
from megatron_bridge.learner import MegatronLearner
from megatron_bridge.model.build import build_chunks
from megatron_bridge.parallel.layout import Layout, initialize, leave_layout
from megatron_bridge.step.fp8_emulation import emulated, quantize_input
from megatron_bridge.weights import (
    NameMap,
    export_hf,
    export_stage,
    load_hf,
    load_named,
    parameter_names,
    stage_tensors,
)
from pipeline.config.recipe import LearnerSection
from precision.formats.formats import fake_quantize
from precision.formats.quant_map import QuantMap
from precision.formats.rollout_format import RolloutFormat
from precision.supervised import Supervised
from tests.support.parameters import RankParameters

SCORED = (
    Layout(data=4),
    Layout(data=2, pipeline=2, expert=2),
    Layout(tensor=2, data=2, expert=2, sequence=True),
)
ROWS = [[1, 5, 9, 2, 40, 33, 8, 60], [3, 3, 7, 21], [50, 2, 2, 14, 9, 11], [6, 17, 30, 44, 12]]


def scores(layout: Layout, folder: Path) -> dict[str, list[float]]:
    """Log-probabilities of ROWS without and with the rollout's formats, row after row."""
    section = LearnerSection(
        precision="fp32",
        tensor_parallel=layout.tensor,
        sequence_parallel=layout.sequence,
        pipeline_parallel=layout.pipeline,
        data_parallel=layout.data,
        expert_parallel=layout.expert,
        expert_tensor_parallel=layout.expert_tensor,
    )
    learner = MegatronLearner(folder, section, Supervised(), temperature=1.0, total_steps=1)
    assert learner.model_config.experts is not None

    def score() -> list[float]:
        return [float(x) for row in learner.score_tokens(ROWS) for x in row]

    found = {"plain": score()}
    for name in ("fp8_tensor", "fp8_block"):
        with emulated(
            learner, QuantMap.for_decoder(learner.model_config.num_layers, name, learner.model_config.experts.count)
        ):
            found[name] = score()
    assert score() == found["plain"]
    return found


def expert_inputs_are_quantized_whole(chunk: torch.nn.Module) -> bool:
    """The input of an expert's last linear is divided over expert tensor ranks, its scales are of whole tokens."""
    linear = chunk.get_submodule("decoder.layers.0.mlp.experts.local_experts.0.linear_fc2")
    whole = torch.randn(6, 24, generator=torch.Generator().manual_seed(0)) * torch.logspace(-3, 3, 24)
    group = linear.tp_group
    mine = whole.chunk(group.size(), -1)[group.rank()]
    for name in RolloutFormat:
        quantized = quantize_input(name, linear, (mine,))[0]
        if not torch.equal(quantized, fake_quantize(whole, name, per_token=True).chunk(group.size(), -1)[group.rank()]):
            return False
    return True


def run_layout(layout: Layout, folder: Path, out: Path) -> None:
    rank = dist.get_rank()
    initialize(layout, seed=0, deadline_s=240)
    shape = ModelConfig.from_hf(read_hf_config(folder))
    original = load_file(folder / "model.safetensors")
    dtype = original["model.norm.weight"].dtype
    chunks = build_chunks(shape, layout, dtype, 1.0)
    load_hf(chunks, shape, folder)
    stage_order = []
    stage_wrong = []
    for name, tensor in export_stage(chunks, shape):
        stage_order.append(name)
        if tensor.dtype != dtype or not torch.equal(tensor, original[name]):
            stage_wrong.append(name)
    assert stage_order == stage_tensors(chunks, shape)
    whole = {name: tensor.clone() for name, tensor in export_hf(chunks, shape)}
    again = build_chunks(shape, layout, dtype, 1.0)
    load_named(again, shape, original.items())
    pairs = zip(*(list(parameter_names(model, NameMap(shape))) for model in (chunks, again)), strict=True)
    found = {
        "stage_order": stage_order,
        "stage_wrong": stage_wrong,
        "whole": list(whole),
        "wrong": [name for name, t in whole.items() if t.dtype != dtype or not torch.equal(t, original[name])],
        "named_wrong": [name for (name, a), (_, b) in pairs if not torch.equal(a, b)],
        "chunks": len(chunks),
        "stage": RankParameters.here(chunks, shape).stage,
    }
    if shape.experts is not None:
        found["expert_inputs"] = expert_inputs_are_quantized_whole(chunks[0])
    if shape.experts is not None and layout in SCORED:
        found["scores"] = scores(layout, folder)
    (out / f"{rank}.json").write_text(json.dumps(found))
    leave_layout()


def measure(cases: list[tuple[dict[str, int], Path, Path]]) -> None:
    """One of four ranks: every case in turn, as sizes of the layout, model folder and folder of what is found."""
    for sizes, folder, out in cases:
        run_layout(Layout(**sizes), folder, out)

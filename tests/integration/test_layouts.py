"""Every layout does the arithmetic of one process: `evenkeel verify layouts`, on the combinations that say most.

Each is a trap that was met: interleaved stages (silently wrong when gloo's sends are batched or outputs deallocated),
context parallelism (Megatron's own layers have none), whole experts under tensor parallelism (gradients reduced over
too few ranks), checkpoints read by other layouts.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from launch.verify.layouts import QUANTITIES, Case, compare, read, run_cases, write_model
from megatron_bridge.checkpoint.dcp import CheckpointIndex, stream_hf_tensors
from megatron_bridge.hf.model_config import ModelConfig
from pipeline.config.recipe import LearnerSection, layout_name, parse_layout
from pipeline.errors import RecipeError
from tests.support.rank_programs import forked_programs

TOLERANCE = 1e-5
CASES = [
    Case("dense", "one"),
    Case("dense", "CP2"),
    Case("dense", "DP2×PLAIN"),
    Case("dense", "TP2×SP×CP2"),
    Case("dense", "TP2×SP×PP2×VPP2×RECOMPUTE×MB2"),
    Case("dense", "TP2×PP2", "saved"),
    Case("dense", "one", "loaded"),
    Case("dense", "TP2", "loaded"),
    Case("dense", "DP2", "loaded"),
    Case("padded", "one"),
    Case("padded", "TP2×SP"),
    Case("padded", "TP2×PP2", "saved"),
    Case("padded", "one", "loaded"),
    Case("experts", "one"),
    Case("experts", "TP2×SP"),
    Case("experts", "EP2"),
    Case("experts", "PP2×EP2", "saved"),
    Case("experts", "one", "loaded"),
    Case("replay", "one"),
    Case("replay", "CP2"),
    Case("replay", "PP2×EP2×MB2"),
]
REPLAY_TOLERANCE = 1e-6


ODD = 151
"""Tokens of a vocabulary that two ranks cannot share evenly, more than a padded rank has rows."""


def give_odd_vocabulary(model: Path) -> None:
    """Other embeddings and another head, of ODD rows."""
    tensors = load_file(model / "model.safetensors")
    generator = torch.Generator().manual_seed(1)
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        if name in tensors:
            tensors[name] = 0.3 * torch.randn(ODD, tensors[name].shape[1], generator=generator)
    save_file(tensors, model / "model.safetensors")
    config = json.loads((model / "config.json").read_text(encoding="utf-8")) | dict(vocab_size=ODD)
    (model / "config.json").write_text(json.dumps(config), encoding="utf-8")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("layouts")
    write_model(root / "dense", experts=False)
    write_model(root / "padded", experts=False)
    give_odd_vocabulary(root / "padded")
    write_model(root / "experts", experts=True)
    write_model(root / "replay", experts=True)
    with forked_programs():
        run_cases(root, CASES)
    return root


@pytest.mark.parametrize("case", [case for case in CASES if case.name.count(" ") > 1 or case.layout != "one"], ids=str)
def test_a_layout_trains_like_one_process(folder: Path, case: Case) -> None:
    found = compare(read(folder, f"{case.model} one"), read(folder, case.name))
    assert set(found) == set(QUANTITIES)
    assert max(found.values()) <= TOLERANCE


@pytest.mark.parametrize("layout", ["CP2", "PP2×EP2×MB2"])
def test_replayed_experts_score_like_one_process(folder: Path, layout: str) -> None:
    one, other = read(folder, "replay one")["logprobs"], read(folder, f"replay {layout}")["logprobs"]
    np.testing.assert_allclose(other, one, rtol=REPLAY_TOLERANCE)
    live = read(folder, "experts one")["logprobs"]
    assert np.abs(live - one).mean() > 0.01


def test_the_comparison_sees_what_differs(folder: Path) -> None:
    reference = read(folder, "dense one")
    other = {name: values.copy() for name, values in reference.items()}
    other["weight_change"][7] += 1e-4
    other["loss"][1] *= 1 + 1e-4
    found = compare(reference, other)
    assert found["weight_change"] > TOLERANCE
    assert found["loss"] == pytest.approx(1e-4, rel=1e-3)
    assert found["grad_norm"] == found["ess"] == 0.0
    assert (
        compare(reference, read(folder, "experts one") | {"weight_change": reference["weight_change"]})["loss"] > 0.01
    )


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("TP2xPP2", dict(tensor_parallel=2, pipeline_parallel=2)),
        ("TP2×SP", dict(tensor_parallel=2, sequence_parallel=True)),
        ("EP4", dict(expert_parallel=4, data_parallel=4)),
        ("EP4×CP2", dict(expert_parallel=4, context_parallel=2, data_parallel=2)),
        ("one×MB3", dict(micro_batch_rows=3)),
    ],
)
def test_names_of_layouts(name: str, fields: dict[str, Any]) -> None:
    assert parse_layout(name) == fields


@pytest.mark.parametrize("name", ["one", "TP2×PP4×VPP2×CP2×DP3×SP×RECOMPUTE", "EP2×DP2×SELECTIVE"])
def test_a_name_is_read_as_it_was_written(name: str) -> None:
    assert layout_name(LearnerSection(**parse_layout(name))) == name


@pytest.mark.parametrize(
    ("name", "expected"),
    [*((one, "is not one of TPn") for one in ("TP", "TP0", "XP2", "tp2", "")), ("TP2147483648", "at most 65536")],
)
def test_other_names_are_refused(name: str, expected: str) -> None:
    with pytest.raises(RecipeError, match=expected):
        parse_layout(name)


def test_what_pads_a_vocabulary_is_cut_from_a_checkpoint(folder: Path) -> None:
    index = CheckpointIndex(folder / "padded.checkpoint")
    stored = index.tensors["embedding.word_embeddings.weight"].shape
    config = ModelConfig.from_hf(json.loads((folder / "padded/config.json").read_text(encoding="utf-8")))
    assert (config.vocab_size, stored[0]) == (ODD, 256)
    found = {name: tuple(tensor.shape) for name, tensor in stream_hf_tensors(index, config)}
    assert found == config.tensors()

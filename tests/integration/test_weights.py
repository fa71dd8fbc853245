"""HF → Megatron → HF on four real ranks: every tensor comes back bit for bit, whatever the layout."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from megatron_bridge.hf.model_config import ModelConfig
from tests.integration.workers import weights_worker
from tests.support.ranks import run_ranks

SIZES: dict[str, Any] = dict(
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    vocab_size=64,
    max_position_embeddings=64,
    tie_word_embeddings=False,
)
MODELS: dict[str, dict[str, Any]] = {
    "tied": SIZES | dict(architectures=["Qwen3ForCausalLM"], tie_word_embeddings=True),
    "odd": SIZES | dict(architectures=["Qwen3ForCausalLM"], vocab_size=149),
    "few": SIZES | dict(architectures=["Qwen3ForCausalLM"], vocab_size=21, tie_word_embeddings=True),
    "biased": SIZES | dict(architectures=["Qwen2ForCausalLM"]),
    "experts": SIZES
    | dict(architectures=["Qwen3MoeForCausalLM"], num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24),
}
TP2_PP2 = dict(tensor=2, pipeline=2)
LAYOUTS: dict[str, tuple[str, dict[str, Any]]] = {
    "tied tp2 pp2": ("tied", TP2_PP2),
    "tied pp2 vpp2": ("tied", dict(pipeline=2, virtual=2, data=2)),
    "odd tp2 pp2": ("odd", TP2_PP2),
    "few tp2 dp2": ("few", dict(tensor=2, data=2)),
    "biased tp2 pp2 vpp2": ("biased", dict(**TP2_PP2, virtual=2)),
    "experts dp4": ("experts", dict(data=4)),
    "experts tp2 pp2": ("experts", dict(**TP2_PP2, sequence=True)),
    "experts ep2 pp2": ("experts", dict(pipeline=2, data=2, expert=2)),
    "experts ep2 tp2": ("experts", dict(tensor=2, data=2, expert=2, sequence=True)),
    "experts ep2 etp2": ("experts", dict(tensor=2, data=2, expert=2, expert_tensor=2, sequence=True)),
    "experts etp2": ("experts", dict(data=4, expert_tensor=2)),
}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """layout → what each of the four ranks found."""
    root = tmp_path_factory.mktemp("weights")
    for seed, (name, config) in enumerate(MODELS.items()):
        (root / name).mkdir()
        (root / name / "config.json").write_text(json.dumps(config))
        generator = torch.Generator().manual_seed(seed)
        dtype = torch.bfloat16 if name == "biased" else torch.float32
        tensors = {
            tensor: (0.3 * torch.randn(size, generator=generator)).to(dtype)
            for tensor, size in ModelConfig.from_hf(config).tensors().items()
        }
        save_file(tensors, root / name / "model.safetensors")
    cases = []
    for number, (model, layout) in enumerate(LAYOUTS.values()):
        (root / str(number)).mkdir()
        cases.append((layout, root / model, root / str(number)))
    run_ranks(4, weights_worker.measure, cases)
    return {
        name: [json.loads((root / str(number) / f"{rank}.json").read_text()) for rank in range(4)]
        for number, name in enumerate(LAYOUTS)
    }


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_tensor_comes_back_bit_for_bit_on_every_rank(found: dict[str, list[dict[str, Any]]], layout: str) -> None:
    expected = ModelConfig.from_hf(MODELS[LAYOUTS[layout][0]]).tensors()
    for rank in found[layout]:
        assert rank["wrong"] == []
        assert len(rank["whole"]) == len(set(rank["whole"]))
        assert set(rank["whole"]) == set(expected)
        assert rank["named_wrong"] == []
        assert rank["chunks"] == LAYOUTS[layout][1].get("virtual", 1)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_stages_share_the_tensors_without_overlap_and_their_ranks_agree_on_the_order(
    found: dict[str, list[dict[str, Any]]], layout: str
) -> None:
    expected = ModelConfig.from_hf(MODELS[LAYOUTS[layout][0]]).tensors()
    by_stage: dict[int, list[str]] = {}
    for rank in found[layout]:
        assert rank["stage_wrong"] == []
        assert by_stage.setdefault(rank["stage"], rank["stage_order"]) == rank["stage_order"]
    assert len(by_stage) == LAYOUTS[layout][1].get("pipeline", 1)
    assert sorted(name for order in by_stage.values() for name in order) == sorted(expected)


@pytest.mark.parametrize("layout", ["experts ep2 pp2", "experts ep2 tp2"])
def test_experts_score_alike_in_every_layout_with_and_without_emulated_fp8(
    found: dict[str, list[dict[str, Any]]], layout: str
) -> None:
    single = {name: np.array(scores) for name, scores in found["experts dp4"][0]["scores"].items()}
    for rank in found[layout]:
        np.testing.assert_allclose(rank["scores"]["plain"], single["plain"], atol=2e-5, rtol=0)
        for rollout_format in ("fp8_tensor", "fp8_block"):
            gap = np.abs(single[rollout_format] - single["plain"]).mean()
            assert gap > 1e-3
            # A rounding difference of 1e-7 may flip an e4m3 value, so a single token can differ by a whole step.
            assert np.abs(rank["scores"][rollout_format] - single[rollout_format]).mean() < 0.1 * gap


@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name.startswith("experts")])
def test_emulated_fp8_quantizes_the_whole_token_of_an_expert_whatever_share_a_rank_holds(
    found: dict[str, list[dict[str, Any]]], layout: str
) -> None:
    assert all(rank["expert_inputs"] for rank in found[layout])

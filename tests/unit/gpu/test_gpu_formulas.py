"""The arithmetic of the GPU checks: references, bounds, FLOPs, tables. What needs a GPU is only called by them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_bridge.hf.model_config import ModelConfig
from precision.formats import formats
from precision.formats.rollout_format import RolloutFormat
from tests.gpu import models
from tests.gpu.check import Scale
from tests.gpu.checks import logprob, te_linear, training


@pytest.fixture
def scale(tmp_path: Path) -> Scale:
    (tmp_path / "check").mkdir()
    return Scale(rehearsal=True, part="bf16", folder=tmp_path / "check")


def rounded(values: Tensor, fmt: str) -> Tensor:
    """With one scale, to e4m3 or e5m2, and back."""
    dtype, largest = {"e4m3": (torch.float8_e4m3fn, 448.0), "e5m2": (torch.float8_e5m2, 57344.0)}[fmt]
    scale = values.abs().max() / largest
    return (values / scale).to(dtype).double() * scale


@pytest.mark.parametrize("precision", ["bf16", "fp8_tensor", "fp8_block"])
def test_an_emulated_layer_is_within_its_bounds(precision: str) -> None:
    """And a layer that quantized nothing, or a gradient too much, is not."""
    x, weight, gradient = te_linear.operands(512, 256, 384, "cpu")
    x64, w64, g64 = (one.detach().double() for one in (x, weight, gradient))
    gradient_format = te_linear.gradient_format(precision)
    quantized: dict[str, Any] = {
        "bf16": (x64, w64, g64),
        "fp8_tensor": (rounded(x64, "e4m3"), rounded(w64, "e4m3"), rounded(g64, gradient_format)),
        "fp8_block": (
            formats.fake_quantize(x64, RolloutFormat.FP8_BLOCK, per_token=True),
            formats.fake_quantize(w64, RolloutFormat.FP8_BLOCK),
            formats.fake_quantize(g64, RolloutFormat.FP8_BLOCK, per_token=True),
        ),
    }
    qx, qw, qg = quantized[precision]
    found = dict(forward=(qx @ qw.t()).bfloat16(), dgrad=(qg @ qw).bfloat16(), wgrad=(qg.t() @ qx).bfloat16())
    errors = {f"{precision}_{name}": value for name, value in te_linear.errors(found, x, weight, gradient).items()}
    goals = [goal for goal in te_linear.GOALS if goal.figure in errors]
    assert [goal.judge(errors)[0] for goal in goals] == ["met"] * 3
    if precision != "bf16":
        exact = dict(forward=x64 @ w64.t(), dgrad=g64 @ w64, wgrad=g64.t() @ x64)
        nothing = {f"{precision}_{n}": v for n, v in te_linear.errors(exact, x, weight, gradient).items()}
        assert [goal.judge(nothing)[0] for goal in goals] == ["missed"] * 3


def test_flops_of_a_step_by_hand() -> None:
    sizes = models.SIZES["1.7b"]
    config = dict(
        architectures=["Qwen3ForCausalLM"],
        vocab_size=models.VOCABULARY,
        hidden_size=sizes["hidden"],
        num_hidden_layers=sizes["layers"],
        num_attention_heads=sizes["heads"],
        num_key_value_heads=sizes["kv_heads"],
        head_dim=sizes["head_dim"],
        intermediate_size=sizes["ffn"],
        max_position_embeddings=4096,
        tie_word_embeddings=True,
    )
    layer = 2048 * (2048 + 2 * 1024) + 2048 * 2048 + 3 * 2048 * 6144
    parameters = 28 * layer + 151_936 * 2048
    attention = 2 * 28 * 2048 * 2048
    by_hand = 3 * (2 * parameters + attention)
    assert parameters == 1_720_451_072
    assert by_hand / 1e9 == pytest.approx(11.03, abs=0.005)
    per_token = training.model_flops(ModelConfig.from_hf(config), 1, 2048.0)
    assert per_token == pytest.approx(by_hand, rel=2e-4)  # the norms' weights count too
    assert training.model_flops(ModelConfig.from_hf(config), 32_752, 2048.0) / 1e12 == pytest.approx(361.2, abs=0.2)


def test_logprob_errors_see_a_wrong_path(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    logits = (torch.randn(8, 1, 500) * 3).bfloat16()
    labels = torch.randint(0, 500, (8, 1))
    right = logprob.accuracy(logits.clone(), labels)
    met = [goal.judge(right)[0] for goal in logprob.GOALS if goal.figure.endswith("_error")]
    assert met == ["met"] * 3
    monkeypatch.setattr(logprob, "score", lambda z, t: score_without_temperature(z, t))
    wrong = logprob.accuracy(logits.clone(), labels)
    assert [goal.judge(wrong)[0] for goal in logprob.GOALS if goal.figure.endswith("_error")] == ["missed"] * 3


def score_without_temperature(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    scores = torch.log_softmax(logits.float(), -1)
    return scores.gather(-1, labels[..., None])[..., 0], -(scores.exp() * scores).sum(-1)

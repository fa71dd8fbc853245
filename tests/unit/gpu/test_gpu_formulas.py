"""The arithmetic of the GPU checks: references, bounds, FLOPs, tables. What needs a GPU is only called by them."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from launch.verify.parity import Rows
from megatron_bridge.hf.model_config import ModelConfig
from precision.formats import formats
from tests.gpu import models, timing
from tests.gpu.checks import logprob, parity, publish, te_linear, training
from tests.gpu.scale import Scale


@pytest.fixture
def scale(tmp_path: Path) -> Scale:
    (tmp_path / "check").mkdir()
    return Scale(rehearsal=True, part="bf16", folder=tmp_path / "check")


def rounded(values: Tensor, fmt: str) -> Tensor:
    """With one scale, to e4m3 or e5m2, and back."""
    dtype, largest = {"e4m3": (torch.float8_e4m3fn, 448.0), "e5m2": (torch.float8_e5m2, 57344.0)}[fmt]
    scale = values.abs().max() / largest
    return (values / scale).to(dtype).double() * scale


@pytest.mark.parametrize(("left", "right"), [("e4m3", "e4m3"), ("e5m2", "e4m3")])
def test_products_of_rounded_operands_are_off_as_derived(left: str, right: str) -> None:
    torch.manual_seed(0)
    a, b = torch.randn(256, 512).double(), torch.randn(512, 256).double()
    error = timing.relative_error(rounded(a, left) @ rounded(b, right), a @ b)
    assert error == pytest.approx(te_linear.product_error(left, right), rel=0.08)


def test_bounds_of_a_linear_layer_are_those_of_the_derivation() -> None:
    assert te_linear.rounding_error("e4m3") == pytest.approx(0.0245, abs=5e-5)
    assert te_linear.rounding_error("e5m2") == pytest.approx(0.0491, abs=5e-5)
    bounds = {goal.figure: (goal.at_least, goal.at_most) for goal in te_linear.GOALS}
    assert bounds["fp8_tensor_forward"] == (0.0173, 0.0416)
    assert bounds["fp8_tensor_dgrad"] == (0.0274, 0.0658)
    assert bounds["fp8_block_wgrad"] == (0.0173, 0.0416)
    assert bounds["bf16_forward"] == (None, 0.01)


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
            formats.fake_quantize_activation(x64, 128),
            formats.fake_quantize_block(w64),
            formats.fake_quantize_activation(g64, 128),
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


def test_responses_are_what_the_engine_sampled() -> None:
    rows = Rows(
        tokens=[[1, 2, 3, 4], [5, 6, 7]],
        prompt=[np.array([-1.0]), np.array([])],
        sampled=[np.array([-2.0, -3.0]), np.array([-4.0, -5.0])],
    )
    learner = [np.array([-9.0, -2.5, -3.0]), np.array([-4.0, -5.0])]
    decoded = parity.joined(rows.sampled)
    found = parity.responses(rows, learner)
    assert found.tolist() == [-2.5, -3.0, -4.0, -5.0]
    assert parity.mean_gap(found, decoded) == pytest.approx(0.125)
    measured = parity.gaps(found, decoded)
    assert measured["k3"] == pytest.approx((math.exp(-0.5) - 1 + 0.5) / 4)
    assert measured["max_gap"] == pytest.approx(0.5)


def test_a_publish_that_the_engine_did_not_take_is_no_figure() -> None:
    class Channel:
        def publish(self, version: int) -> dict[str, float]:
            return {"publish_s": 1.0, "engines_failed": 1.0}

        def wait_for_folder(self) -> None: ...

    class Learner:
        model: tuple[()] = ()

    with pytest.raises(RuntimeError, match="did not take version 3"):
        publish.one_publish(Learner(), Channel(), 3)

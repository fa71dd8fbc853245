"""The arithmetic of the GPU checks: references, bounds, FLOPs, tables. What needs a GPU is only called by them."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from launch.convert.new_model import new_model
from launch.verify.parity import Rows
from megatron_bridge.hf.model_config import ModelConfig
from precision.formats import formats
from tests.gpu import models, timing
from tests.gpu.checks import engine, logprob, loop, parity, publish, quantize, te_linear, training
from tests.gpu.goals import NotMeasured
from tests.gpu.learners import rows_of, supervised_batch
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


def test_cosines_by_hand(tmp_path: Path) -> None:
    save_file({"a": torch.tensor([3.0, 0.0]), "b": torch.tensor([0.0, 4.0])}, tmp_path / "one")
    save_file({"a": torch.tensor([1.0, 1.0]), "b": torch.tensor([0.0, 2.0])}, tmp_path / "other")
    whole, lowest = training.cosines(tmp_path / "one", tmp_path / "other")
    assert whole == pytest.approx(11.0 / (5.0 * math.sqrt(6.0)))
    assert lowest == pytest.approx(math.sqrt(0.5))


def test_speed_up_and_loss_gap_follow_from_the_parts() -> None:
    figures: Any = {
        "bf16_step_s": 2.0,
        "fp8_tensor_step_s": 1.25,
        "bf16_loss": [9.0, 5.0, 4.0, 3.0, 2.0, 1.0],
        "fp8_tensor_loss": [7.0, 5.1, 3.9, 3.1, 2.1, 0.9],
    }
    found = training.derive(figures)
    assert found["fp8_tensor_speed_up"] == 1.6
    assert found["fp8_tensor_loss_gap"] == pytest.approx(0.1)
    assert "fp8_block_speed_up" not in found


def test_every_second_token_follows_from_the_one_before() -> None:
    rows = rows_of(1000, count=3, length=9, seed=1)
    assert all(len(row) == 9 for row in rows)
    assert all(row[i + 1] == (row[i] * 7 + 3) % 512 for row in rows for i in range(0, 8, 2))
    assert supervised_batch(1000, 3, 9, 1).num_response_tokens == 3


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


def test_differing_bytes_are_counted(scale: Scale) -> None:
    for weight in quantize.samples(scale):
        reference = formats.quantize_block(weight)
        assert quantize.differing_bytes(formats.quantize_block(weight.clone()), reference) == 0
    values, scales = formats.quantize_block(torch.randn(130, 129))
    changed = values.clone()
    changed.view(torch.uint8)[5, 7] ^= 1
    assert quantize.differing_bytes((changed, scales * (1 + 2**-23)), (values, scales)) >= 2


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


def test_a_publish_is_summed_up(scale: Scale) -> None:
    rounds = [
        dict(publish_s=s, transfer_s=s / 2, transfer_bytes=4e6, gather_s=s / 4, engines_failed=0.0)
        for s in (1.0, 2.0, 9.0)
    ]
    found = publish.summary(scale, rounds)
    assert found["publish_s"] == 2.0
    assert found["gb_s"] == pytest.approx(2e-3)
    assert found["transfer_gb_s"] == pytest.approx(4e-3)
    assert isinstance(found["over_copy"], float)
    assert found["over_copy"] == pytest.approx(2.0 / float(str(found["copy_s"])))
    assert publish.timers(rounds) == [["timer", "s", "share"], ["transfer_s", 1.0, 0.5], ["gather_s", 0.5, 0.25]]
    derived = publish.derive({"fp8_block_publish_s": 1.0, "bf16_publish_s": 2.0})
    assert derived == {"fp8_over_bf16": 0.5}


def test_a_publish_that_the_engine_did_not_take_is_no_figure() -> None:
    class Channel:
        def publish(self, version: int) -> dict[str, float]:
            return {"publish_s": 1.0, "engines_failed": 1.0}

        def wait_for_folder(self) -> None: ...

    class Learner:
        model: tuple[()] = ()

    with pytest.raises(RuntimeError, match="did not take version 3"):
        publish.one_publish(Learner(), Channel(), 3)


def test_the_loop_is_summed_up_without_its_first_steps() -> None:
    metrics = [
        dict(
            step=step,
            time=100.0 + (50.0 if step < 3 else 50.0 + 2.0 * (step - 2)),
            seconds=dict(wait=float(step), update=1.0),
            num_tokens=30,
            ess=1.0 - step / 100,
            k3_kl=0.01 * step,
            reward_mean=0.1 * step,
        )
        for step in range(8)
    ]
    found = loop.summary(metrics)
    assert found["steps"] == 8.0
    assert found["step_s"] == pytest.approx(2.0)
    assert found["wait_s"] == 5.0
    assert found["publish_s"] == 0.0
    assert found["rollout_tokens_s"] == pytest.approx(15.0)
    assert found["lowest_ess"] == pytest.approx(0.93)
    table = found["seconds of each step"]
    assert isinstance(table, list)
    assert table[0] == ["step", *loop.PHASES, "reward", "ess", "k3_kl"]
    assert table[8] == [7, 7.0, 0.0, 1.0, 0.0, 0.0, 0.7, 0.93, 0.07]


def test_engine_figures_are_compared() -> None:
    figures: Any = {"bf16_tokens_s_64": 100.0, "fp8_block_tokens_s_64": 130.0, "bf16_tokens_s_256": 0.0}
    assert engine.derive(figures) == {"fp8_over_bf16_64": 1.3}


def test_the_shared_model_has_the_vocabulary_of_qwen3(scale: Scale, monkeypatch: pytest.MonkeyPatch) -> None:
    """At one small layer; every character of so large an alphabet is a token of its own."""
    made: list[dict[str, Any]] = []

    def small(directory: Path, **settings: Any) -> None:
        made.append(settings)
        new_model(directory, **{**settings, **models.SIZES["tiny"], "hidden": 16, "layers": 1})

    monkeypatch.setattr(models, "new_model", small)
    full = Scale(rehearsal=False, part="bf16", folder=scale.folder)
    folder = models.shared_model(full, "0.6b")
    assert json.loads((folder / "config.json").read_text())["vocab_size"] == 151_936
    assert models.shared_model(full, "0.6b") == folder
    assert len(made) == 1


def test_copy_bandwidth_counts_bytes_both_ways(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "seconds", lambda action, **_: 0.5)
    assert timing.copy_bandwidth("cpu", 1000) == 4000.0
    assert timing.matmul_rate("cpu", 16, torch.bfloat16) == 2 * 16**3 / 0.5


def test_an_error_with_nan_misses() -> None:
    assert math.isnan(timing.relative_error(torch.tensor([1.0, math.nan]), torch.ones(2)))
    assert timing.relative_error(torch.tensor([1.0, 1.0]), torch.tensor([1.0, 0.0])) == 1.0


def test_a_rehearsal_has_no_transformer_engine(scale: Scale) -> None:
    with pytest.raises(NotMeasured, match="needs Transformer Engine on a GPU"):
        scale.needs_transformer_engine()
    assert scale.of(8192, 64) == 64
    assert Scale(rehearsal=False, part="p", folder=scale.folder).of(8192, 64) == 8192

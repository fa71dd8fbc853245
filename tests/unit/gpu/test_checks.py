"""Parts of GPU checks that a CPU can run: a decoder layer on a stand-in of Transformer Engine's, nvidia-smi's lines."""

from __future__ import annotations

import copy
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from launch.convert.new_model import new_model
from tests.gpu.checks import loop, te_layer
from tests.gpu.learners import learner


class FusedLinear(torch.nn.Module):
    """A linear layer with the norm before it: it casts its weight for the first micro-batch of a step and keeps that,
    and as under delayed scaling its first cast is a poor one."""

    def __init__(self, norm: Any, linear: Any, eps: float) -> None:
        super().__init__()
        self.layer_norm_weight, self.weight, self.eps = norm.weight, linear.weight, eps
        self.is_first_microbatch, self.casts = True, 0

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:
        if self.is_first_microbatch:
            self.scale, self.casts = (1.0 if self.casts else 0.5), self.casts + 1
        self.is_first_microbatch = False
        normed = F.rms_norm(x, (x.shape[-1],), self.layer_norm_weight, self.eps)
        return F.linear(normed, self.weight * self.scale), None


@pytest.mark.filterwarnings("ignore::DeprecationWarning:megatron")
def test_layers_with_fused_norms_are_compared_after_their_weights_were_cast_again(tmp_path: Path) -> None:
    new_model(tmp_path / "model", layers=1)
    with learner(tmp_path / "model", precision="fp32", micro_batch_tokens=66, overlap_grad_reduce=False) as subject:
        model = subject.model[0]
        while hasattr(model, "module"):
            model = model.module
        (layer,) = model.decoder.layers
        eps = model.config.layernorm_epsilon
        layer.self_attention.linear_qkv = FusedLinear(layer.input_layernorm, layer.self_attention.linear_qkv, eps)
        layer.mlp.linear_fc1 = FusedLinear(layer.pre_mlp_layernorm, layer.mlp.linear_fc1, eps)
        layer.input_layernorm, layer.pre_mlp_layernorm = torch.nn.Identity(), torch.nn.Identity()
        model.config = copy.copy(model.config)
        model.config.fp8 = "hybrid"  # in the model's own: its layers compute as before
        found = te_layer.compare(subject, 2, 33)
    assert found["out"] < 1e-5
    assert found["gradient"] < 1e-5


def test_the_share_of_kernels_is_that_of_the_steps_which_count() -> None:
    lines = "".join(f"2026/11/27 04:05:{second:02}.500, {second}\n" for second in range(50)) + "2026/11/27 04:05:5"
    begins = datetime(2026, 11, 27, 4, 5, 10).timestamp()
    assert loop.kernel_share(lines, begins, begins + 20) == pytest.approx(0.195)

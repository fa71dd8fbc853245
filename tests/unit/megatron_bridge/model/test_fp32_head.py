"""The float32 head on a CPU, bit by bit what Megatron makes of converted factors; and what a GPU does instead."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from megatron.core import parallel_state
from megatron.core.tensor_parallel import ColumnParallelLinear
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megatron_bridge.model import fp32_head
from megatron_bridge.model.fp32_head import FP32OutputLayer, split_rows
from megatron_bridge.parallel.layout import Layout, initialize
from tests.support.learners import leave_world
from tests.support.ranks import run_ranks

HIDDEN, VOCAB, TOKENS = 24, 320, 12


class Converted(ColumnParallelLinear):  # type: ignore[misc]
    """What stood here before: float32 copies of both factors, made and kept for each micro-batch."""

    def forward(self, input_: Tensor, weight: Tensor | None = None, **kwargs: Any) -> Any:
        head = self.weight if weight is None else weight
        return super().forward(input_.float(), head.float(), **kwargs)


def layer(kind: type[ColumnParallelLinear], **settings: Any) -> Any:
    config = TransformerConfig(
        num_layers=1, hidden_size=HIDDEN, num_attention_heads=2, params_dtype=torch.bfloat16,
        use_cpu_initialization=True, gradient_accumulation_fusion=False, **settings,
    )  # fmt: skip
    torch.manual_seed(0)
    init = torch.nn.init.normal_
    made = ColumnParallelLinear(HIDDEN, VOCAB, config=config, init_method=init, bias=False, skip_bias_add=True)
    made.__class__ = kind
    return made


def step(made: Any, tokens: int = TOKENS) -> list[Tensor]:
    """Logits, and the gradients of hidden states and head."""
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(tokens, 1, HIDDEN, generator=generator).bfloat16().requires_grad_()
    logits, _ = made(hidden)
    logits.backward(torch.randn(logits.shape, generator=generator))
    return [logits.detach(), hidden.grad, made.weight.grad]


@pytest.fixture
def alone() -> Iterator[None]:
    initialize(Layout(), seed=0, deadline_s=30.0)
    yield
    leave_world()


@pytest.fixture
def mixed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU's products: exact ones of bfloat16 values, added in float32; the gradient in three pieces."""

    def mm(left: Tensor, right: Tensor, *, out_dtype: torch.dtype) -> Tensor:
        assert left.dtype is right.dtype is torch.bfloat16
        assert out_dtype is torch.float32
        return left.float() @ right.float()

    monkeypatch.setattr(fp32_head, "has_mixed_products", lambda factor: factor.dtype is torch.bfloat16)
    monkeypatch.setattr(torch, "mm", mm)
    monkeypatch.setattr(fp32_head, "PART_BYTES", 0)


@pytest.mark.usefixtures("alone")
def test_on_a_cpu_no_bit_moves() -> None:
    for found, before in zip(step(layer(FP32OutputLayer)), step(layer(Converted)), strict=True):
        assert found.dtype is before.dtype
        assert torch.equal(found, before)


def both_kinds(sequence: bool) -> list[bool]:
    initialize(Layout(tensor=2, sequence=sequence), seed=0, deadline_s=60.0)
    settings = dict(tensor_model_parallel_size=2, sequence_parallel=sequence)
    found, before = (step(layer(kind, **settings)) for kind in (FP32OutputLayer, Converted))
    assert parallel_state.get_tensor_model_parallel_world_size() == 2
    return [torch.equal(one, other) for one, other in zip(found, before, strict=True)]


@pytest.mark.parametrize("sequence", [False, True])
def test_nor_over_tensor_parallel_ranks(sequence: bool) -> None:
    assert run_ranks(2, both_kinds, sequence) == [[True] * 3] * 2


@pytest.mark.usefixtures("alone", "mixed")
def test_a_gpu_keeps_to_float32() -> None:
    """Logits are the same sums. Of gradients, each term of a sum may be off by 2⁻¹⁶ of itself; then both are rounded
    to bfloat16, to neighbors at most 2⁻⁷ apart where the sums fall on both sides of a middle."""
    found, before = step(layer(FP32OutputLayer)), step(layer(Converted))
    assert torch.equal(found[0], before[0])
    for one, other in zip(found[1:], before[1:], strict=True):
        assert one.dtype is torch.bfloat16
        torch.testing.assert_close(one, other, rtol=2**-7, atol=TOKENS * 2**-16)
        assert (one != other).float().mean() < 0.1, "bfloat16 hides nearly all of it"


def saved_bytes(made: Any) -> int:
    kept: list[int] = []
    own = {made.weight.data_ptr()}

    def keep(tensor: Tensor) -> Tensor:
        kept.append(0 if tensor.data_ptr() in own else tensor.nbytes)
        return tensor

    hidden = torch.randn(TOKENS, 1, HIDDEN).bfloat16().requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        made(hidden)
    return sum(kept)


@pytest.mark.usefixtures("alone")
def test_nothing_is_kept_in_float32() -> None:
    """Beside the parameter: the hidden states as they came, where both factors were kept in float32."""
    assert saved_bytes(layer(Converted)) == 4 * HIDDEN * (TOKENS + VOCAB)
    assert saved_bytes(layer(FP32OutputLayer)) == 2 * HIDDEN * TOKENS


values = st.floats(width=32, allow_nan=False, allow_infinity=False, min_value=-(2.0**60), max_value=2.0**60)


@given(st.lists(st.tuples(values, values), min_size=1, max_size=50))
def test_products_are_exact_and_parts_add_up(pairs: list[tuple[float, float]]) -> None:
    """Without underflow: 8 significant bits by 8 are 16, of float32's 24. Exact, too, are they in TF32 (11 bits)."""
    full = torch.tensor(pairs, dtype=torch.float32)
    full = torch.where(full.abs() < 1e-15, 0.0, full)
    left, right = full.bfloat16().unbind(1)
    assert torch.equal((left.float() * right.float()).double(), left.double() * right.double())
    as_tf32 = (left.float().view(torch.int32) & ~0x1FFF).view(torch.float32)
    assert torch.equal(as_tf32, left.float())
    high, low = split_rows(full).double().chunk(2)
    assert ((high + low - full.double()).abs() <= 2.0**-16 * full.double().abs()).all()


def test_torch_takes_the_product_that_a_gpu_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shapes, strides and dtypes of the calls, on the meta device; torch runs them on CUDA alone."""
    monkeypatch.setattr(fp32_head, "has_mixed_products", lambda factor: factor.dtype is torch.bfloat16)
    like: Any = SimpleNamespace(device="meta", dtype=torch.bfloat16)
    head, hidden = torch.empty(VOCAB, HIDDEN, **vars(like)), torch.empty(TOKENS, 1, HIDDEN, **vars(like))
    logits = fp32_head.float32_product(hidden, head.t())
    assert (logits.shape, logits.dtype) == ((TOKENS, 1, VOCAB), torch.float32)
    of_hidden, of_head = fp32_head.split_products(logits.flatten(0, 1), hidden.flatten(0, 1), head)
    assert (of_hidden.shape, of_hidden.dtype) == ((TOKENS, HIDDEN), torch.float32)
    assert (of_head.shape, of_head.dtype) == (head.shape, torch.bfloat16)

"""Multiply by the LM head with float32 results, from factors that stay in bfloat16 (ScaleRL).

    logits = h Wᵀ            grad h = g W            grad W = gᵀ h            h, W bfloat16; logits, g float32

The product of two bfloat16 values has 16 significant bits and is exact in float32. So the GPU's bfloat16 units, which
add in float32, compute the logits as float32 units would, at 15 times the rate of an H100's. A gradient g is split
into two bfloat16 parts with |g - (high + low)| <= 2⁻¹⁶ |g|, 32 times finer than TF32, before sums are rounded to
bfloat16 (2⁻⁸). No float32 copy of h or W is made or kept.

torch.mm takes `out_dtype` on CUDA only, and defines no derivative for it. Elsewhere the factors are converted first.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import ColumnParallelLinear
from torch import Tensor

from megatron_bridge.parallel.rank_sync import all_gather_single, reduce_scatter_single


class FP32OutputLayer(ColumnParallelLinear):  # type: ignore[misc]
    """The LM head with logits in float32 [sequence, batch, vocab/tp]. Hidden states and parameter keep their dtype."""

    def _forward_impl(
        self,
        input: Tensor,
        weight: Tensor,
        *,
        allreduce_dgrad: bool,
        sequence_parallel: bool,
        tp_group: dist.ProcessGroup,
        **_: Any,
    ) -> Any:
        group = tp_group if allreduce_dgrad or sequence_parallel else None
        return _Float32Product.apply(input, weight, group, sequence_parallel)  # type: ignore[no-untyped-call]


class _Float32Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, head: Tensor, group: dist.ProcessGroup | None, is_split: bool) -> Tensor:
        """Return `hidden` [sequence, batch, hidden] @ `head`ᵀ [vocab/tp, hidden], float32. `is_split`: each rank of
        `group` has a part of the sequence."""
        ctx.save_for_backward(hidden, head)
        ctx.group, ctx.is_split = group, is_split
        return float32_product(_whole(ctx, hidden), head.t())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None]:
        hidden, head = ctx.saved_tensors
        gradient, states = grads[0], _whole(ctx, hidden).flatten(0, 1)
        rows = gradient.contiguous().flatten(0, 1)
        if has_mixed_products(head):
            of_hidden, of_head = split_products(rows, states, head)
        else:
            of_hidden, of_head = float32_product(rows, head), float32_product(rows.t(), states)
        of_hidden = of_hidden.view(*gradient.shape[:2], -1)
        if ctx.is_split:
            whole, of_hidden = of_hidden, of_hidden.new_empty(hidden.shape)
            reduce_scatter_single(of_hidden, whole, group=ctx.group)
        elif ctx.group is not None:
            dist.all_reduce(of_hidden, group=ctx.group)
        return of_hidden.to(hidden.dtype), of_head.to(head.dtype), None, None


def _whole(ctx: Any, hidden: Tensor) -> Tensor:
    """Return the hidden states of the whole sequence. Collective if they are split."""
    if not ctx.is_split:
        return hidden
    whole = hidden.new_empty(hidden.shape[0] * dist.get_world_size(ctx.group), *hidden.shape[1:])
    all_gather_single(whole, hidden.contiguous(), group=ctx.group)
    return whole


def has_mixed_products(factor: Tensor) -> bool:
    """Return whether torch multiplies tensors like `factor` with a float32 result."""
    return factor.is_cuda and factor.dtype is torch.bfloat16


def float32_product(left: Tensor, right: Tensor) -> Tensor:
    """Return `left` [..., k] @ `right` [k, n] in float32 [..., n]."""
    if has_mixed_products(right):
        product = torch.mm(left.flatten(0, -2), right, out_dtype=torch.float32)
        return product.view(*left.shape[:-1], -1)
    return torch.matmul(left.float(), right.float())


PART_BYTES = 256 << 20
"""Size of the gradient's bfloat16 parts that exist at once."""


def split_products(gradient: Tensor, states: Tensor, head: Tensor) -> tuple[Tensor, Tensor]:
    """Return `gradient` @ `head`, float32 [tokens, hidden], and `gradient`ᵀ @ `states`, bfloat16 [vocab/tp, hidden].
    `gradient` is float32 [tokens, vocab/tp], of which some columns are split at a time; the others are bfloat16."""
    of_hidden, of_head = torch.zeros_like(states, dtype=torch.float32), torch.empty_like(head)
    step = max(1, PART_BYTES // (4 * len(gradient)) // 128) * 128
    for first in range(0, len(head), step):
        some = slice(first, first + step)
        parts = split_rows(gradient[:, some])
        of_hidden += float32_product(parts, head[some]).view(2, *states.shape).sum(0)
        of_head[some] = float32_product(parts.t(), states.repeat(2, 1))
    return of_hidden, of_head


def split_rows(values: Tensor) -> Tensor:
    """Return bfloat16 [2 × rows, columns] whose halves add up to float32 `values` [rows, columns]: first each value
    rounded to bfloat16, then what is left of it, rounded too. Each rounding leaves at most 2⁻⁸ of a value."""
    parts = values.new_empty(2, *values.shape, dtype=torch.bfloat16)
    parts[0].copy_(values)
    torch.sub(values, parts[0], out=parts[1])
    return parts.flatten(0, 1)

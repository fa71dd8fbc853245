"""What every objective keeps: padding, order and micro-batching do not matter; garbage behind the mask is not seen."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from precision.objectives import CISPO, P3O, Clipped, Objective, StepContext, Supervised, TokenBatch

STEP_SCOPED: list[Objective] = [
    P3O(kl_estimator="official"),
    P3O(kl_estimator="importance"),
    Clipped(clip_low=0.2, clip_high=0.28),
    CISPO(cap=2.0),
    Supervised(),
]
OBJECTIVES = [*STEP_SCOPED, P3O(ess_scope="micro_batch")]
FIELDS = ("logprobs", "advantages", "sampler_logprobs")
READS = [(o, field) for o in OBJECTIVES for field in (FIELDS[:2] if isinstance(o, Supervised) else FIELDS)]
GARBAGE = [math.nan, -math.inf, math.inf, -120.0, 3e38]

step_scoped = pytest.mark.parametrize("objective", STEP_SCOPED, ids=repr)
every = pytest.mark.parametrize("objective", OBJECTIVES, ids=repr)


@st.composite
def batches(draw: Any) -> tuple[Tensor, TokenBatch]:
    """Float64 logprobs and a ragged batch with at least one response token."""
    rows, width = draw(st.integers(1, 5)), draw(st.integers(1, 7))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 10_000)))
    spread = draw(st.sampled_from([0.01, 0.3, 3.0]))
    sampler = -3 * torch.rand(rows, width, generator=generator, dtype=torch.float64)
    logprobs = sampler + spread * torch.randn(rows, width, generator=generator, dtype=torch.float64)
    mask = torch.rand(rows, width, generator=generator) < 0.7
    mask[0, 0] = True
    advantages = torch.randn(rows, width, generator=generator, dtype=torch.float64)
    return logprobs, TokenBatch(sampler_logprobs=sampler, advantages=advantages, mask=mask)


def context_for(batch: TokenBatch) -> StepContext:
    return StepContext(num_tokens=int(batch.mask.sum()), step_ess=0.8)


def evaluate(
    objective: Objective, logprobs: Tensor, batch: TokenBatch, context: StepContext
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    leaf = logprobs.clone().requires_grad_()
    loss, sums = objective(leaf, batch, context)
    loss.backward()  # type: ignore[no-untyped-call]
    assert leaf.grad is not None
    return loss.detach(), leaf.grad, sums


def on(batch: TokenBatch, change: Any) -> TokenBatch:
    return TokenBatch(**{field.name: change(getattr(batch, field.name)) for field in dataclasses.fields(batch)})


def assert_sums_close(left: dict[str, Tensor], right: dict[str, Tensor]) -> None:
    assert left.keys() == right.keys()
    for name, value in left.items():
        torch.testing.assert_close(value, right[name], rtol=1e-9, atol=1e-9)


@every
@pytest.mark.parametrize("garbage", GARBAGE)
def test_garbage_behind_the_mask_changes_no_bit(objective: Objective, garbage: float) -> None:
    generator = torch.Generator().manual_seed(3)
    logprobs = -torch.rand(3, 4, generator=generator)
    mask = torch.tensor([[1, 1, 0, 0], [1, 1, 1, 1], [0, 1, 0, 1]]).bool()
    batch = TokenBatch(sampler_logprobs=logprobs - 0.1, advantages=torch.randn(3, 4, generator=generator), mask=mask)
    context = context_for(batch)
    dirty = TokenBatch(
        sampler_logprobs=torch.where(mask, batch.sampler_logprobs, garbage),
        advantages=torch.where(mask, batch.advantages, garbage),
        mask=mask,
    )
    clean = evaluate(objective, torch.where(mask, logprobs, -1.0), batch, context)
    soiled = evaluate(objective, torch.where(mask, logprobs, garbage), dirty, context)
    assert torch.equal(clean[0], soiled[0])
    assert torch.equal(clean[1], soiled[1])
    assert (soiled[1][~mask] == 0).all()
    assert all(torch.equal(value, soiled[2][name]) for name, value in clean[2].items())


@every
@settings(deadline=None, max_examples=40)
@given(case=batches())
def test_padding_and_permutation(objective: Objective, case: tuple[Tensor, TokenBatch]) -> None:
    logprobs, batch = case
    loss, gradient, sums = evaluate(objective, logprobs, batch, context_for(batch))
    order = torch.randperm(len(logprobs), generator=torch.Generator().manual_seed(1))

    def rearranged(values: Tensor) -> Tensor:
        return torch.nn.functional.pad(values[order], (2, 3, 0, 1))

    moved = evaluate(objective, rearranged(logprobs), on(batch, rearranged), context_for(batch))
    torch.testing.assert_close(moved[0], loss, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(moved[1], rearranged(gradient), rtol=1e-9, atol=1e-12)
    assert_sums_close(moved[2], sums)


@step_scoped
@settings(deadline=None, max_examples=40)
@given(case=batches(), cut=st.integers(0, 5))
def test_micro_batches_add_up_to_the_step(objective: Objective, case: tuple[Tensor, TokenBatch], cut: int) -> None:
    logprobs, batch = case
    context = context_for(batch)
    loss, gradient, sums = evaluate(objective, logprobs, batch, context)
    head = evaluate(objective, logprobs[:cut], on(batch, lambda x: x[:cut]), context)
    tail = evaluate(objective, logprobs[cut:], on(batch, lambda x: x[cut:]), context)
    torch.testing.assert_close(head[0] + tail[0], loss, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(torch.cat([head[1], tail[1]]), gradient, rtol=1e-9, atol=1e-12)
    assert_sums_close({name: head[2][name] + tail[2][name] for name in sums}, sums)


@every
def test_a_micro_batch_of_padding_is_silent(objective: Objective) -> None:
    nothing = torch.zeros(2, 3)
    batch = TokenBatch(sampler_logprobs=nothing, advantages=nothing, mask=nothing.bool())
    loss, gradient, sums = evaluate(objective, nothing, batch, StepContext(num_tokens=7, step_ess=0.5))
    assert loss == 0
    assert torch.equal(gradient, nothing)
    assert all(value == 0 for value in sums.values())


@pytest.mark.parametrize(("objective", "field"), READS)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_non_finite_under_the_mask_raises(objective: Objective, field: str, bad: float) -> None:
    values = {name: torch.full((2, 2), -0.5) for name in FIELDS}
    values[field][1, 0] = bad
    logprobs = values.pop("logprobs")
    batch = TokenBatch(**values, mask=torch.ones(2, 2, dtype=torch.bool))
    with pytest.raises(FloatingPointError):
        objective(logprobs, batch, StepContext(num_tokens=4, step_ess=0.5))


@every
def test_sums_are_detached_float64_and_leave_num_tokens_to_the_caller(objective: Objective) -> None:
    values = torch.full((1, 2), -0.5)
    batch = TokenBatch(sampler_logprobs=values, advantages=values, mask=torch.ones(1, 2, dtype=torch.bool))
    _, sums = objective(values.clone().requires_grad_(), batch, StepContext(num_tokens=2, step_ess=0.5))
    assert "num_tokens" not in sums
    for value in sums.values():
        assert value.shape == ()
        assert value.dtype is torch.float64
        assert not value.requires_grad


@every
def test_a_step_without_tokens_and_broadcast_advantages_are_refused(objective: Objective) -> None:
    values = torch.full((2, 3), -0.5)
    mask = torch.ones(2, 3, dtype=torch.bool)
    good = TokenBatch(sampler_logprobs=values, advantages=values, mask=mask)
    with pytest.raises(ValueError, match="num_tokens of the step is 0"):
        objective(values, good, StepContext(num_tokens=0, step_ess=0.5))
    broadcast = TokenBatch(sampler_logprobs=values, advantages=values[:, :1], mask=mask)
    with pytest.raises(ValueError, match="every token"):
        objective(values, broadcast, StepContext(num_tokens=6, step_ess=0.5))

"""What every objective keeps: layout, order, padding and micro-batching do not matter; what was not sampled is not
seen; exactly on-policy it is the policy gradient."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from precision.corrections import MIS, OPSM, TIS, Corrected, IcePop, Rejection
from precision.objectives.cispo import CISPO
from precision.objectives.clipped import GSPO, Clipped, Decoupled
from precision.objectives.dppo_tv import DPPOTV
from precision.objectives.m2po import M2PO
from precision.objectives.mu_grpo import MuGRPO
from precision.objectives.objective import Objective, Prepared, ScoredStep, StepContext, TokenBatch
from precision.objectives.p3o import P3O, P4O
from precision.objectives.topr import TOPR
from precision.ratios import MAX_LOG_RATIO
from precision.settings import choices_in
from precision.supervised import Supervised
from tests.support.examples import examples
from tests.support.objectives import (
    TOKEN_FIELDS,
    Layout,
    Outcome,
    offsets_of,
    reordered,
    run,
    scored_step,
    scored_steps,
    soiled,
)

READS_SAMPLER: list[Objective] = [
    P3O(kl_estimator="official"),
    P3O(kl_estimator="importance"),
    P3O(ess_unit="sequence"),
    P3O(kl_estimator="none"),
    Clipped(clip_low=0.2, clip_high=0.28),
    Clipped(dual_clip=1.5),
    CISPO(cap=2.0),
    GSPO(clip_low=0.1, clip_high=0.1, anchor="rollout"),
    MuGRPO(ratio_max=1.5, kappa=0.8),
    MuGRPO(kappa=0.8, keeps_trigger=False),
    MuGRPO(trigger="above", kappa=1.2, scope="token"),
    MuGRPO(kappa=0.5, scope="response"),
    MuGRPO(trigger="none"),
    TOPR(),
    DPPOTV(threshold=0.05),
    DPPOTV(threshold=0.05, square_coefficient=0.0),
    M2PO(),
    M2PO(variant="mask"),
    Corrected(inner=CISPO(), correction=OPSM(delta=0.1)),
]
ANCHORED = Clipped(anchor="old")
NEW = [kind() for kind in choices_in("precision.objectives", Objective).values() if kind.__name__ not in globals()]
"""Objectives that this file does not import: added later, with their default settings."""
READS_OLD_ANCHOR: list[Objective] = [
    ANCHORED,
    GSPO(clip_low=0.1, clip_high=0.1, anchor="old"),
    Decoupled(mismatch_cap=1.2),
    Decoupled(mismatch_cap=1.2, over_cap="truncate"),
    M2PO(variant="areal"),
    P4O(),
    Corrected(inner=ANCHORED, correction=TIS(cap=1.2)),
    Corrected(inner=ANCHORED, correction=MIS(level="sequence", veto=0.5, normalized=True)),
    Corrected(inner=ANCHORED, correction=Rejection(level="geometric", low=0.9, high=1.1)),
    Corrected(inner=GSPO(clip_low=0.1, clip_high=0.1, anchor="old"), correction=IcePop()),
]
READS_OLD_ANCHOR += [objective for objective in NEW if objective.facts.needs_old_logprobs]
READS_SAMPLER += [objective for objective in NEW if not objective.facts.needs_old_logprobs]
MICRO_BATCH_INVARIANT: list[Objective] = [*READS_SAMPLER, *READS_OLD_ANCHOR, Supervised()]
OBJECTIVES = [*MICRO_BATCH_INVARIANT, P3O(ess_scope="micro_batch")]
FIELDS = ("logprobs", "advantages", "rollout_logprobs", "old_logprobs")
READS = [
    (objective, field)
    for objective in OBJECTIVES
    for field in FIELDS[: 2 if isinstance(objective, Supervised) else 3 + (objective in READS_OLD_ANCHOR)]
]
GARBAGE = [math.nan, -math.inf, math.inf, -120.0, 3e38]

micro_batch_invariant = pytest.mark.parametrize("objective", MICRO_BATCH_INVARIANT, ids=repr)
every = pytest.mark.parametrize("objective", OBJECTIVES, ids=repr)
scored = pytest.mark.parametrize("objective", [o for o in OBJECTIVES if o.facts.needs_scoring], ids=repr)


def fixed_step() -> ScoredStep:
    """Three responses with tokens that were not sampled at the start, in the middle, at the end."""
    step = scored_step(
        [[0.3, -0.4, 0.1, -1.5], [0.2, -0.1], [-0.6, 0.5, 0.4, 0.3, -0.2]],
        [1.5, 0.5, -2.0],
        old=[[0.2, -0.2, -0.2, -1.6], [0.2, -0.3], [-0.7, 0.4, 0.3, 0.2, -0.3]],
    )
    return dataclasses.replace(step, sampled=torch.tensor([0, 1, 1, 1, 1, 0, 1, 1, 0, 0, 1]).bool())


def changed(step: ScoredStep, change: Callable[[Tensor], Tensor]) -> ScoredStep:
    """`change` on everything that lies along the token axis."""
    names = (*TOKEN_FIELDS, "sampled")
    return dataclasses.replace(step, **{name: change(getattr(step, name)) for name in names})


def one_row_each(step: ScoredStep) -> Tensor:
    """[num_rows, longest] flat places, padded on the right."""
    rows = [torch.nonzero(step.row == row).flatten() for row in range(len(step.offsets) - 1)]
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=-1)


def assert_same(left: Outcome, right: Outcome, *, rtol: float = 1e-6, atol: float = 1e-7) -> None:
    """Of the sums and measured numbers, and of loss and gradient up to rounding; some prepare float32."""
    assert left.loss == pytest.approx(right.loss, rel=rtol, abs=atol)
    torch.testing.assert_close(left.gradient, right.gradient, rtol=rtol, atol=atol)
    assert left.sums == pytest.approx(right.sums, rel=rtol, abs=atol)
    assert left.prepared.measured == pytest.approx(dict(right.prepared.measured), rel=rtol, abs=atol)
    assert (left.prepared.step_ess or 1.0) == pytest.approx(right.prepared.step_ess or 1.0, rel=rtol)


@every
@pytest.mark.parametrize("garbage", GARBAGE)
def test_garbage_in_tokens_that_were_not_sampled_changes_no_bit(objective: Objective, garbage: float) -> None:
    step = fixed_step()
    clean, dirty = run(objective, step), run(objective, soiled(step, garbage))
    assert torch.equal(dirty.gradient, clean.gradient)
    assert (dirty.gradient[~step.sampled] == 0).all()
    assert (dirty.loss, dirty.sums) == (clean.loss, clean.sums)
    assert (dirty.prepared.measured, dirty.prepared.step_ess) == (clean.prepared.measured, clean.prepared.step_ess)


@scored
def test_an_objective_says_whether_it_reads_the_scored_logprobs(objective: Objective) -> None:
    """Where it does not, old log-probabilities stand in their place: the step is not scored."""
    step = fixed_step()
    unscored = dataclasses.replace(step, logprobs=torch.full_like(step.logprobs, math.nan))
    if objective.facts.reads_step_logprobs:
        with pytest.raises(FloatingPointError):
            objective.prepare(unscored)
        return
    left, right = objective.prepare(step), objective.prepare(unscored)
    assert torch.equal(left.advantages, right.advantages)
    assert (left.anchor_logprobs is None) == (right.anchor_logprobs is None)
    if left.anchor_logprobs is not None and right.anchor_logprobs is not None:
        assert torch.equal(left.anchor_logprobs, right.anchor_logprobs)
    assert left.measured == right.measured


@every
@pytest.mark.parametrize("garbage", GARBAGE)
def test_garbage_behind_the_mask_gets_no_gradient(objective: Objective, garbage: float) -> None:
    mask = torch.tensor([[1, 1, 0, 0], [1, 1, 1, 1], [0, 1, 0, 1]]).bool()

    def masked(value: float) -> Tensor:
        return torch.where(mask, value, garbage)

    leaf = masked(-0.9).requires_grad_()
    batch = TokenBatch(rollout_logprobs=masked(-1.0), advantages=masked(0.5), mask=mask, anchor_logprobs=masked(-0.8))
    loss, _ = objective.loss(leaf, batch, StepContext(num_tokens=8, step_ess=0.8))
    loss.backward()  # type: ignore[no-untyped-call]
    assert leaf.grad is not None
    assert loss.isfinite()
    assert (leaf.grad[~mask] == 0).all()
    assert (leaf.grad[mask] != 0).all()


@every
@settings(max_examples=examples(12))
@given(step=scored_steps())
def test_tokens_that_were_not_sampled_might_as_well_be_absent(objective: Objective, step: ScoredStep) -> None:
    """But for responses without a sampled token."""
    kept = step.sampled & (step.row_sum(step.sampled) > 0)[step.row]
    _, lengths = step.row[kept].unique(return_counts=True)
    without = dataclasses.replace(changed(step, lambda x: x[kept]), offsets=offsets_of(lengths))
    whole, bare = run(objective, step), run(objective, without)
    assert bare.loss == pytest.approx(whole.loss, rel=1e-6, abs=1e-7)
    torch.testing.assert_close(bare.gradient, whole.gradient[kept], rtol=1e-6, atol=1e-7)


@every
@settings(max_examples=examples(12))
@given(step=scored_steps())
def test_order_of_responses_and_padding(objective: Objective, step: ScoredStep) -> None:
    moved, index = reordered(step)
    padded = torch.nn.functional.pad(one_row_each(moved), (2, 3, 0, 1), value=-1)
    there, here = run(objective, moved, [padded]), run(objective, step)
    assert_same(there, dataclasses.replace(here, gradient=here.gradient[index]))


def layouts(step: ScoredStep, cut: int) -> list[Layout]:
    """By response, cut into micro-batches; responses split over two [1, tokens] rows, as context parallelism does;
    single tokens back to front."""
    rows, places = one_row_each(step), torch.arange(len(step.row))
    return [
        [part for part in (rows[:cut], rows[cut:]) if part.numel()],
        [places[0::2].unsqueeze(0), places[1::2].unsqueeze(0)],
        [place.reshape(1, 1) for place in places.flip(0)],
    ]


@micro_batch_invariant
@settings(max_examples=examples(12))
@given(step=scored_steps(), cut=st.integers(0, 5))
def test_micro_batches_in_any_layout_add_up_to_the_step(objective: Objective, step: ScoredStep, cut: int) -> None:
    whole = run(objective, step)
    for layout in layouts(step, cut):
        assert_same(run(objective, step, layout), whole, rtol=1e-9, atol=1e-12)


@every
@settings(max_examples=examples(12))
@given(step=scored_steps())
def test_exactly_on_policy_it_is_the_score_function_gradient(objective: Objective, step: ScoredStep) -> None:
    """-A / N for every sampled token: nothing weighs, clips, vetoes or anchors."""
    same = step.rollout_logprobs
    gradient = run(objective, dataclasses.replace(step, logprobs=same, old_logprobs=same)).gradient
    expected = torch.where(step.sampled, -step.advantages, 0.0) / step.sampled.sum()
    torch.testing.assert_close(gradient, expected, rtol=1e-7, atol=1e-15)  # 1e-8: epsilon inside the ESS


@scored
@settings(max_examples=examples(12))
@given(step=scored_steps())
def test_what_is_prepared_is_a_factor_on_the_advantage(objective: Objective, step: ScoredStep) -> None:
    prepared = objective.prepare(step)
    assert prepared.advantages.shape == step.advantages.shape
    after, before = prepared.advantages[step.sampled], step.advantages[step.sampled]
    assert after.isfinite().all()
    assert ((after == 0) | (after.sign() == before.sign())).all()
    assert all(math.isfinite(value) for value in prepared.measured.values())
    single = objective.prepare(changed(step, lambda x: x.float() if x.is_floating_point() else x))
    assert single.advantages.dtype is torch.float32
    assert single.anchor_logprobs is None or single.anchor_logprobs.dtype is torch.float32


@every
def test_a_micro_batch_of_padding_is_silent(objective: Objective) -> None:
    nothing = torch.zeros(2, 3)
    leaf = nothing.clone().requires_grad_()
    batch = TokenBatch(rollout_logprobs=nothing, advantages=nothing, mask=nothing.bool(), anchor_logprobs=nothing)
    loss, sums = objective.loss(leaf, batch, StepContext(num_tokens=7, step_ess=0.5))
    loss.backward()  # type: ignore[no-untyped-call]
    assert loss == 0
    assert leaf.grad is not None
    assert torch.equal(leaf.grad, nothing)
    assert all(value == 0 for value in sums.values())


@pytest.mark.parametrize(("objective", "field"), READS, ids=repr)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_non_finite_under_the_mask_raises(objective: Objective, field: str, bad: float) -> None:
    step = scored_step([[0.0, 0.0], [0.0, 0.0]], [1.0, -1.0])
    values = getattr(step, field).clone()
    values[2] = bad
    with pytest.raises(FloatingPointError):
        run(objective, dataclasses.replace(step, **{field: values}))


@every
def test_sums_are_detached_float64_and_leave_num_tokens_to_the_caller(objective: Objective) -> None:
    values = torch.full((1, 2), -0.5)
    mask = torch.ones(1, 2, dtype=torch.bool)
    batch = TokenBatch(rollout_logprobs=values, advantages=values, mask=mask, anchor_logprobs=values)
    _, sums = objective.loss(values.clone().requires_grad_(), batch, StepContext(num_tokens=2, step_ess=0.5))
    assert sums
    assert "num_tokens" not in sums
    for value in sums.values():
        assert value.shape == ()
        assert value.dtype is torch.float64
        assert not value.requires_grad


@every
def test_a_step_without_tokens_and_broadcast_advantages_are_refused(objective: Objective) -> None:
    values = torch.full((2, 3), -0.5)
    mask = torch.ones(2, 3, dtype=torch.bool)
    good = TokenBatch(rollout_logprobs=values, advantages=values, mask=mask, anchor_logprobs=values)
    with pytest.raises(ValueError, match="num_tokens of the step is 0"):
        objective.loss(values, good, StepContext(num_tokens=0, step_ess=0.5))
    broadcast = dataclasses.replace(good, advantages=values[:, :1])
    with pytest.raises(ValueError, match="every token"):
        objective.loss(values, broadcast, StepContext(num_tokens=6, step_ess=0.5))


@pytest.mark.parametrize("objective", [Clipped(anchor="old"), Decoupled(), P4O()], ids=repr)
def test_an_anchor_that_was_not_prepared_is_asked_for(objective: Objective) -> None:
    values = torch.zeros(1, 1)
    batch = TokenBatch(rollout_logprobs=values, advantages=values, mask=values.bool())
    with pytest.raises(ValueError, match="anchor_logprobs"):
        objective.loss(values, batch, StepContext(num_tokens=1, step_ess=0.5))


@every
def test_a_large_ratio_is_refused_or_stays_finite_in_float32(objective: Objective) -> None:
    """64 tokens of one ratio e^size, which float32 holds up to e^88, with advantages of 30: products, squares and sums
    of what is let through must be finite."""
    for size in (20.0, 39.9, 40.1, 60.0, 84.0, 85.0, 86.0, 87.0, 87.9, 88.1, 200.0):
        for advantage in (30.0, -30.0):
            step = scored_step([[size] * 32] * 2, [advantage] * 2, old=[[0.0] * 32] * 2)
            fields = {name: getattr(step, name).float() for name in FIELDS}
            try:
                outcome = run(objective, dataclasses.replace(step, **fields))
            except FloatingPointError:
                assert size > MAX_LOG_RATIO
                continue
            assert math.isfinite(outcome.loss)
            assert bool(outcome.gradient.isfinite().all())
            assert all(math.isfinite(value) for value in (*outcome.sums.values(), *outcome.prepared.measured.values()))


@every
def test_what_an_objective_states_of_its_ratios_is_what_its_gradient_shows(objective: Objective) -> None:
    """Other log-probabilities of the engine, or of the stage's start, change the gradient if and only if it says so."""
    step = fixed_step()
    for field, states_so in (
        ("rollout_logprobs", objective.facts.weighs_by_rollout_ratio),
        ("old_logprobs", objective.facts.needs_old_logprobs),
    ):
        gradients = [run(objective, step).gradient]
        for ends in ((-0.9, 0.6), (0.6, -0.9), (-0.2, 0.1)):
            shifted = getattr(step, field) + torch.linspace(*ends, len(step.row), dtype=torch.float64)
            gradients.append(run(objective, dataclasses.replace(step, **{field: shifted})).gradient)
        assert any(not torch.equal(moved, gradients[0]) for moved in gradients) == states_so, field


@every
def test_a_term_without_advantage_is_stated(objective: Objective) -> None:
    step = fixed_step()
    nothing = dataclasses.replace(step, advantages=torch.zeros_like(step.advantages))
    assert bool(run(objective, nothing).gradient.any()) == objective.facts.has_term_without_advantage


class Prepares(Supervised):
    def prepare(self, step: ScoredStep) -> Prepared:
        return Prepared(advantages=step.advantages * 2.0)


def test_a_prepare_of_its_own_is_called() -> None:
    """Whoever writes one need not remember to ask for it."""
    assert run(Prepares(), fixed_step()).gradient.tolist() == (2.0 * run(Supervised(), fixed_step()).gradient).tolist()

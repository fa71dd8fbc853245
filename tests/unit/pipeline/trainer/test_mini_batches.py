"""Several optimizer steps of one batch: how it is divided, what each step gets, and what becomes of the metrics."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from pipeline.advantages.compute import AdvantageComputer
from pipeline.advantages.methods.dr_grpo import DrGRPO
from pipeline.data.batch import Batch
from pipeline.ports.learner import Update
from pipeline.trainer.loop import Stopwatch, Trainer
from pipeline.trainer.mini_batches import dealt_together, mini_batches, split_groups
from pipeline.trainer.scoring import Scoring
from pipeline.trainer.step_size import StepSize
from precision.step_size import LrByLag
from tests.support.batches import batch_of_rewards

MIXED, EQUAL = [1.0, 0.0], [1.0, 1.0]


def computer(**options: Any) -> AdvantageComputer:
    section = DrGRPO.model_validate(dict(aggregation="token") | options)
    return AdvantageComputer(section=section, estimator=section.estimator(), max_new_tokens=9)


class Learner:
    """Scores a batch by the number of updates that it has made, and remembers what it was given."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.given: list[dict[str, Any]] = []

    def score(self, batch: Batch) -> Tensor:
        self.calls.append("score")
        return torch.full((batch.num_response_tokens,), float(len(self.given)))

    def update(
        self,
        batch: Batch,
        advantages: Any,
        scored: Any,
        *,
        old_logprobs: Any = None,
        trained: Any = None,
        lr_factor: float = 1.0,
    ) -> Update:
        self.calls.append("update")
        number = len(self.given)
        given = dict(batch=batch, advantages=advantages, scored=scored, old_logprobs=old_logprobs, trained=trained)
        given["lr_factor"] = lr_factor
        self.given.append(given)
        metrics = dict(
            loss=1.0 + number,
            lr=1.0 + number,
            num_tokens=10.0,
            ratio_max=2.0 + number,
            ratio_max_negative=1.0 + number,
            ratio_min=0.5 - number / 10,
        )
        return Update(
            metrics=metrics,
            histogram=[1.0, number],
            device_logprobs=torch.full((batch.num_response_tokens,), float(number)),
        )


def trained(
    batch: Batch,
    updates: int,
    *,
    scores: bool = True,
    reads: bool = True,
    old: Any = None,
    controller: Any = None,
    lr_by_lag: LrByLag = "none",
    **options: Any,
) -> Any:
    learner, unused = Learner(), SimpleNamespace()
    fields: dict[str, Any] = {name: unused for name, field in Trainer.__dataclass_fields__.items() if field.init}
    loop = Trainer(
        **fields
        | dict(
            learner=learner,
            advantage_computer=computer(**options),
            scoring=Scoring(
                prepares=scores, reads_step=reads, reads_old=old is not None, sizes_steps=lr_by_lag == "ess"
            ),
            old_logprobs=old,
            updates_per_batch=updates,
            controller=controller,
            step_size=StepSize(lr_by_lag=lr_by_lag, updates_per_batch=updates, controller=controller),
            reference=None,
        )
    )
    return learner, loop._update(batch, Stopwatch())


def test_one_update_gets_the_batch_itself() -> None:
    batch = batch_of_rewards([MIXED, EQUAL, MIXED])
    learner, update = trained(batch, 1)
    (given,) = learner.given
    assert given["batch"] is batch
    assert given["trained"] is None
    assert update.metrics["loss"] == 1.0
    assert update.logprobs.tolist() == [0.0] * batch.num_response_tokens


def test_each_update_gets_whole_groups_scored_at_its_own_weights_and_old_logprobs_of_the_whole_batch() -> None:
    batch = batch_of_rewards([MIXED] * 5, seed=3)
    whole = torch.arange(batch.num_response_tokens).float()
    learner, update = trained(batch, 2, old=SimpleNamespace(versions=None, of=lambda *_: whole))
    first, second = learner.given
    assert learner.calls == ["score", "update"] * 2
    assert first["batch"].group.tolist() == [0, 0, 1, 1, 2, 2]
    assert second["batch"].group.tolist() == [3, 3, 4, 4]
    assert set(first["scored"].tolist()) == {0.0}
    assert set(second["scored"].tolist()) == {1.0}
    assert [*first["old_logprobs"], *second["old_logprobs"]] == whole.tolist()
    assert update.logprobs.tolist() == [0.0] * len(first["scored"]) + [1.0] * len(second["scored"])


def test_what_is_prepared_from_old_logprobs_alone_is_not_scored_again() -> None:
    batch = batch_of_rewards([MIXED] * 4)
    whole = torch.zeros(batch.num_response_tokens)
    learner, _ = trained(batch, 2, reads=False, old=SimpleNamespace(versions=None, of=lambda *_: whole))
    assert learner.calls == ["update"] * 2
    learner, _ = trained(batch, 1, reads=False, old=SimpleNamespace(versions=None, of=lambda *_: None))
    assert learner.calls == ["score", "update"], "with one update the old policy is that of the step"


def test_metrics_are_means_but_for_totals_and_extremes() -> None:
    batch = batch_of_rewards([MIXED] * 4)
    _, update = trained(batch, 4)
    assert update.metrics == dict(
        loss=2.5,
        lr=4.0,
        num_tokens=40.0,
        num_updated_tokens=batch.num_sampled_tokens,
        num_model_tokens=len(batch.tokens),
        ratio_max=5.0,
        ratio_max_negative=4.0,
        ratio_min=pytest.approx(0.2),
        lr_factor=1.0,
    )
    assert update.histogram == [4.0, 6.0]


def test_excluded_groups_are_in_no_update() -> None:
    batch = batch_of_rewards([EQUAL, MIXED, EQUAL, MIXED, MIXED])
    learner, update = trained(batch, 2, scores=False, zero_variance="exclude")
    assert learner.calls == ["update"] * 2
    assert [given["batch"].group.tolist() for given in learner.given] == [[1, 1, 3, 3], [4, 4]]
    looked_at = np.isfinite(update.logprobs)
    assert looked_at.tolist() == np.repeat(np.isin(batch.group, [1, 3, 4]), batch.response_lengths).tolist()


def test_groups_that_are_skipped_stay_in_their_mini_batch() -> None:
    """The second mini-batch has no other: it is run through the model, for a step needs some token."""
    batch = batch_of_rewards([EQUAL, MIXED, EQUAL, EQUAL])
    learner, _ = trained(batch, 2, zero_variance="skip")
    first, second = learner.given
    assert first["trained"].tolist() == [False, False, True, True]
    assert second["trained"] is None
    assert not second["advantages"].any()


@pytest.mark.parametrize("zero_variance", ["skip", "exclude"])
@pytest.mark.parametrize("updates", [1, 2])
def test_tokens_of_samples_that_the_model_never_read_are_not_counted(zero_variance: str, updates: int) -> None:
    batch = batch_of_rewards([EQUAL, MIXED, EQUAL, MIXED], unsampled=0.3, seed=2)
    _, update = trained(batch, updates, zero_variance=zero_variance)
    read = np.isin(batch.group, [1, 3])
    sampled = batch.loss_mask & np.repeat(read, batch.response_lengths)
    assert update.metrics["num_updated_tokens"] == np.count_nonzero(sampled)
    assert update.metrics["num_model_tokens"] == batch.lengths[read].sum()


def test_fewer_groups_than_updates_are_as_many_updates() -> None:
    learner, _ = trained(batch_of_rewards([MIXED, EQUAL, EQUAL, EQUAL, MIXED]), 4, zero_variance="exclude")
    assert [given["batch"].group.tolist() for given in learner.given] == [[0, 0], [4, 4]]


def test_the_mean_of_an_update_is_over_its_own_responses_and_the_norm_over_the_batch() -> None:
    """Deviations ±½ and ±1½ of 8 samples in 4 groups: standard deviation sqrt((4 · ¼ + 4 · 9/4) / 7). `sequence` gives
    a token of response i the factor N / (R n_i), and N and R are the mini-batch's."""
    batch = batch_of_rewards([[1.0, 0.0], [3.0, 0.0], [1.0, 0.0], [3.0, 0.0]], seed=5)
    parts = mini_batches(computer(aggregation="sequence", batch_normalized=True), batch, 2)
    std = (10 / 7) ** 0.5
    for part in parts:
        lengths = part.batch.response_lengths
        expected = np.array([0.5, -0.5, 1.5, -1.5]) / std * lengths.sum() / (4 * lengths)
        np.testing.assert_allclose(part.advantages, np.repeat(expected, lengths), rtol=1e-6)


def test_selected_samples_are_those_of_the_batch() -> None:
    batch = batch_of_rewards([MIXED, EQUAL, MIXED], seed=7, unsampled=0.3)
    samples = np.array([False, True, True, False, False, True])
    part = batch.select(samples)
    assert (part.index, part.num_samples) == (batch.index, 3)
    for place, sample in enumerate(np.flatnonzero(samples)):
        assert part.sample_tokens(place).tolist() == batch.sample_tokens(int(sample)).tolist()
        ours, theirs = (b.response_offsets[i : i + 2] for b, i in ((part, place), (batch, int(sample))))
        for name in ("rollout_logprobs", "policy_version", "loss_mask"):
            assert getattr(part, name)[slice(*ours)].tolist() == getattr(batch, name)[slice(*theirs)].tolist()
    assert part.reward.tolist() == batch.reward[samples].tolist()


@given(
    groups=st.lists(st.tuples(st.integers(1, 4), st.booleans()), min_size=1, max_size=9),
    count=st.integers(1, 5),
)
def test_a_split_divides_the_groups_that_are_in_the_loss(groups: list[tuple[int, bool]], count: int) -> None:
    group = np.repeat(7 * np.arange(len(groups))[::-1], [size for size, _ in groups])
    in_loss = np.repeat([chosen or i == 0 for i, (_, chosen) in enumerate(groups)], [size for size, _ in groups])
    parts = split_groups(group, in_loss, count)
    assert (sum(part.astype(int) for part in parts) == in_loss).all(), "each sample that is in the loss, once"
    sizes = [len(set(group[part].tolist())) for part in parts]
    assert max(sizes) - min(sizes) <= 1
    assert len(parts) == min(count, len(set(group[in_loss].tolist())))
    in_order = np.concatenate([group[part] for part in parts])
    assert in_order.tolist() == group[in_loss].tolist(), "in the order of the batch"


@given(
    st.lists(st.sampled_from([MIXED, EQUAL]), min_size=1, max_size=12),
    st.integers(1, 4),
    st.sampled_from(["keep", "skip", "exclude"]),
)
def test_what_runs_through_the_model_together_is_dealt_out_together(
    rewards: list[list[float]], count: int, zero_variance: str
) -> None:
    """Every sample once, and each mini-batch is made of whole sets: those that it trains on, and those that it does
    not."""
    batch, one = batch_of_rewards(rewards), computer(zero_variance=zero_variance)
    sets = dealt_together(one, count, batch)
    assert (np.sum(sets, axis=0) == 1).all()
    for part in mini_batches(one, batch, count):
        trained = part.samples.copy()
        trained[part.samples] = True if part.trained is None else part.trained
        for members in sets:
            for ran in (part.samples, trained):
                inside = ran[members]
                assert inside.all() or not inside.any()


@pytest.mark.parametrize(
    ("lr_by_lag", "controllers", "expected"),
    [("none", None, 1.0), ("sqrt", None, 0.5), ("none", 0.25, 0.25), ("sqrt", 0.25, 0.25), ("sqrt", 1.0, 0.5)],
)
def test_older_batches_are_learned_from_by_smaller_steps(
    lr_by_lag: LrByLag, controllers: float | None, expected: float
) -> None:
    batch = batch_of_rewards([MIXED, EQUAL, MIXED])
    batch = replace(batch, index=3, policy_version=np.zeros_like(batch.policy_version))
    controller = None if controllers is None else SimpleNamespace(lr_factor=lambda _: controllers)
    learner, update = trained(batch, 1, controller=controller, lr_by_lag=lr_by_lag)
    assert learner.given[0]["lr_factor"] == update.metrics["lr_factor"] == expected


@pytest.mark.parametrize("scores", [False, True])
def test_by_ess_each_step_is_sized_by_its_own_mini_batch(scores: bool) -> None:
    """The double scores everything by its number of updates: all tokens have the same ratios, so the ESS is 1 where pi
    has moved as one, and less where half of the tokens were sampled by another version."""
    batch = batch_of_rewards([MIXED, MIXED])
    half = torch.arange(batch.num_response_tokens) % 2 == 0
    old = torch.where(half, 0.0, -1.0)
    kept: list[int] = []
    versions = SimpleNamespace(keep=kept.append)
    learner, update = trained(
        batch, 1, scores=scores, reads=False, old=SimpleNamespace(versions=versions, of=lambda *_: old), lr_by_lag="ess"
    )
    assert learner.calls == ["score", "update"]
    assert kept == [batch.index], "once, before the weights change"
    rollout = torch.from_numpy(batch.rollout_logprobs).double()
    rho, mismatch = (0.0 - rollout).exp(), (old.double() - rollout).exp()
    ess = float(rho.sum() ** 2 / (mismatch.sum() * (rho * (0.0 - old).exp()).sum()))
    assert 0.1 < ess < 0.99
    assert update.metrics["staleness_ess"] == pytest.approx(ess)
    assert learner.given[0]["lr_factor"] == update.metrics["lr_factor"] == pytest.approx(1 - (1 - ess) ** 0.5)


def test_by_ess_a_fresh_batch_has_the_whole_step_and_is_not_scored_for_it() -> None:
    batch = batch_of_rewards([MIXED, MIXED])
    old = SimpleNamespace(versions=None, of=lambda *_: None)
    learner, update = trained(batch, 1, scores=False, old=old, lr_by_lag="ess")
    assert learner.calls == ["update"]
    assert update.metrics["lr_factor"] == update.metrics["staleness_ess"] == 1.0

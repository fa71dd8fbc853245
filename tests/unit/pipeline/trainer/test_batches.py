"""Rank 0 waits for a batch and tells the others; what ends its wait ends theirs."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from pipeline.advantages.compute import AdvantageComputer
from pipeline.advantages.methods import DrGRPO
from pipeline.data.batch import VERIFIER_FAILED, Batch, DroppedGroup
from pipeline.data.epochs import claim
from pipeline.data.run_directory import RunDirectory
from pipeline.data.store import BatchStore, LostBatch
from pipeline.errors import DeadlineExceededError, StoppedError, SupersededError
from pipeline.ports.learner import Update
from pipeline.trainer import batches
from pipeline.trainer.batches import (
    STOP_FILE_VARIABLE,
    BatchSource,
    asked_solve_rate,
    dealt_together,
    describe,
    split_groups,
)
from pipeline.trainer.loop import Scoring, Trainer
from precision.ratios import LrByLag
from tests.support.batches import batch_of_rewards, parts_of, update_of
from tests.support.one_rank import OneRank

MakeBatch = Callable[..., Batch]


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    run = RunDirectory(tmp_path)
    run.make_folders()
    return run


def index_of(batch: Batch | None) -> int:
    assert batch is not None
    return batch.index


def source(run: RunDirectory, **changes: Any) -> BatchSource:
    fields: dict[str, Any] = dict(
        run=run, store=BatchStore(run.batches), learner=OneRank(), contract=None, wait_deadline_s=20.0
    )
    return BatchSource(**fields | changes)


def test_a_batch_is_read_once_it_is_there(
    run: RunDirectory, make_batch: MakeBatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batches, "ANSWER_S", 0.05)  # several rounds
    writer = threading.Timer(0.3, BatchStore(run.batches).commit, [make_batch(0)])
    writer.start()
    assert index_of(source(run).wait(0)) == 0
    writer.join()


def test_other_work_goes_on_while_a_batch_is_waited_for(
    run: RunDirectory, make_batch: MakeBatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batches, "ANSWER_S", 0.0)
    turns: list[int] = []

    def meanwhile() -> None:
        turns.append(len(turns))
        if len(turns) == 3:
            BatchStore(run.batches).commit(make_batch(0))

    assert index_of(source(run).wait(0, meanwhile)) == 0
    assert turns == [0, 1, 2]


def test_whether_a_batch_is_there_is_known_without_waiting(run: RunDirectory, make_batch: MakeBatch) -> None:
    assert not source(run).is_there(0)
    BatchStore(run.batches).commit(make_batch(0))
    assert source(run).is_there(0)
    assert not source(run).is_there(1)


def test_a_lost_batch_is_not_waited_for(run: RunDirectory) -> None:
    store = BatchStore(run.batches)
    LostBatch(
        index=0, reason="r", recorded="now", learned=False, groups=(), known="all", next_group=0, open_groups=()
    ).write(store.lost_path(0))
    assert source(run).wait(0) is None


def test_a_request_to_stop_ends_the_wait(
    run: RunDirectory, make_batch: MakeBatch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also when the batch is there: the step is not begun."""
    stop = tmp_path / "stop"
    monkeypatch.setenv(STOP_FILE_VARIABLE, str(stop))
    BatchStore(run.batches).commit(make_batch(0))
    assert index_of(source(run).wait(0)) == 0
    threading.Timer(0.2, stop.touch).start()
    with pytest.raises(StoppedError, match="before batch 1; start the run again"):
        source(run).wait(1)
    with pytest.raises(StoppedError, match="before batch 0"):
        source(run).wait(0)


def test_a_collector_that_stands_still_is_not_waited_for(run: RunDirectory, make_batch: MakeBatch) -> None:
    with pytest.raises(DeadlineExceededError, match=r"waited 0\.1 s for batch 0 .* look at the collector's log"):
        source(run, wait_deadline_s=0.1).wait(0)


def test_a_collector_that_evaluates_or_commits_is_waited_for(run: RunDirectory, make_batch: MakeBatch) -> None:
    """Rank 0 looks at every deadline; each time something has happened since the one before."""
    happens = iter((
        lambda: run.write_evaluation(0, {}),
        lambda: BatchStore(run.batches).commit(make_batch(0)),
        lambda: run.write_evaluation(1, {}),
        lambda: BatchStore(run.batches).commit(make_batch(1)),
    ))  # fmt: skip

    def collector_goes_on() -> bool:
        time.sleep(0.02)  # a folder's time of change advances with the ticks of the kernel
        next(happens)()
        return False

    assert index_of(source(run, wait_deadline_s=0.0, stop_requested=collector_goes_on).wait(1)) == 1


def test_a_superseded_learner_does_not_wait_on(run: RunDirectory) -> None:
    superseded = run.under(claim(run.path, "learner"))
    claim(run.path, "learner")
    with pytest.raises(SupersededError, match="start 2 has taken over"):
        source(superseded).wait(0)


NAN = np.nan
FAILED = {VERIFIER_FAILED: np.array([NAN, NAN, NAN, 1.0], np.float32)}


def test_a_sample_without_a_reward_is_in_no_mean() -> None:
    batch = batch_of_rewards([[1.0, 0.5], [1.0, 0.0]])
    found = describe(replace(batch, reward_parts=FAILED), step=0)
    assert found["reward_mean"] == pytest.approx(2.5 / 3)
    assert found["solve_rate"] == pytest.approx(2 / 3)
    assert found["verifier_failures"] == 1.0
    assert not {"sources", "reward_parts"} & set(found)
    assert describe(batch, step=0)["reward_mean"] == pytest.approx(2.5 / 4)


def test_each_source_has_its_share_and_its_rewards() -> None:
    batch = batch_of_rewards([[1.0, 0.0], [3.0], [0.5]])
    sources = dict(math=range(10), chat=range(10, 15), rare=range(15, 16))
    batch = replace(batch, problem=np.array([9, 9, 10, 14]), sources=sources, reward_parts=FAILED)
    assert describe(batch, step=0)["sources"] == {
        "math": dict(share=0.5, reward_mean=0.5, solve_rate=0.5),
        "chat": dict(share=0.5, reward_mean=3.0, solve_rate=1.0),
        "rare": dict(share=0.0),
    }


def test_dropped_groups_count_for_the_solve_rate() -> None:
    """Of 4 + 4 + 4 samples 1 + 4 + 0 were solved; the groups without contrast were dropped. One has no reward."""
    dropped = (
        DroppedGroup(group=1, reason="all solved", samples=4, solved=4),
        DroppedGroup(group=2, reason="none solved", samples=4),
    )
    batch = replace(batch_of_rewards([[1.0, 0.0, 0.0, 0.0]]), dropped=dropped)
    assert asked_solve_rate(batch) == pytest.approx(5 / 12)
    assert asked_solve_rate(replace(batch, reward_parts=FAILED)) == pytest.approx(5 / 11)


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
            entropy=0.5,
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
            turns=None,
            lr_by_lag=lr_by_lag,
            reference=None,
        )
    )
    return learner, update_of(loop, batch)


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
        entropy=0.5,
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


def test_the_mean_of_an_update_is_over_its_own_responses_and_the_norm_over_the_batch() -> None:
    """Deviations ±½ and ±1½ of 8 samples in 4 groups: standard deviation sqrt((4 · ¼ + 4 · 9/4) / 7). `sequence` gives
    a token of response i the factor N / (R n_i), and N and R are the mini-batch's."""
    batch = batch_of_rewards([[1.0, 0.0], [3.0, 0.0], [1.0, 0.0], [3.0, 0.0]], seed=5)
    parts = parts_of(computer(aggregation="sequence", batch_normalized=True), batch, 2)
    std = (10 / 7) ** 0.5
    for part in parts:
        lengths = part.batch.response_lengths
        expected = np.array([0.5, -0.5, 1.5, -1.5]) / std * lengths.sum() / (4 * lengths)
        np.testing.assert_allclose(part.advantages, np.repeat(expected, lengths), rtol=1e-6)


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
    for part in parts_of(one, batch, count):
        trained = part.episodes.copy()
        trained[part.episodes] = True if part.trained is None else part.trained
        for members in sets:
            for ran in (part.episodes, trained):
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
    controller = None if controllers is None else SimpleNamespace(lr_factor=lambda _: controllers, after=lambda *_: {})
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

"""Ages over the updates of a batch, and terms of a replay; the statistics are compared in tests/integration."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from launch.attribution.rows import SampledRows, ScoringJob, read_experts, responses_of, tokens_of, write_experts
from launch.attribution.score_ranks import version_scores
from launch.verify.layout_ranks import TEMPERATURE, make_batch, random_experts
from launch.verify.layouts import write_model
from megatron_bridge.learner import MegatronLearner
from pipeline.config.recipe import LearnerSection
from precision.supervised import Supervised
from tests.support.learners import learner_here


@pytest.fixture
def learner(tmp_path: Path) -> Iterator[MegatronLearner]:
    write_model(tmp_path / "model", experts=True)
    with learner_here(
        tmp_path / "model",
        LearnerSection(precision="fp32"),
        Supervised(),
        temperature=TEMPERATURE,
        seed=0,
        total_steps=1,
    ) as created:
        yield created


def ages(learner: MegatronLearner, batch_index: int) -> list[str]:
    """The buckets of age that hold tokens of a batch, half of which was sampled by the version before it."""
    batch = make_batch(0, learner.model_config.vocab_size)
    version = np.full(batch.num_response_tokens, batch_index, np.int32)
    version[::2] -= 1
    batch = replace(batch, index=batch_index, policy_version=version)
    mismatch = learner.update(batch, np.ones(batch.num_samples, np.float32), None).mismatch
    assert mismatch is not None
    return list(mismatch.by_split()["age"])


def test_the_second_update_on_a_batch_sees_older_tokens(learner: MegatronLearner) -> None:
    assert [ages(learner, index) for index in (7, 7, 7, 8)] == [["0", "1"], ["1", "2"], ["1", "2"], ["0", "1"]]
    learner.step -= 1  # a batch that is trained again after a resume begins anew
    assert ages(learner, 8) == ["0", "1"]


def test_one_advantage_too_many_is_refused(learner: MegatronLearner) -> None:
    batch = make_batch(0, learner.model_config.vocab_size)
    with pytest.raises(ValueError, match="give one for each sample or one for each token"):
        learner.update(batch, np.zeros(1, np.float32), None)


def test_routing_lies_between_the_learners_own_experts_and_the_engines(
    learner: MegatronLearner, tmp_path: Path
) -> None:
    plain = make_batch(0, learner.model_config.vocab_size)
    experts = random_experts(plain, learner.model_config, seed=1, unknown=0.2)
    live, replayed = learner.logprobs(plain), learner.logprobs(replace(plain, experts=experts))
    rows = SampledRows(
        tokens=[plain.sample_tokens(sample).tolist() for sample in range(plain.num_samples)],
        prompt_lengths=plain.prompt_lengths.tolist(),
        decode=plain.rollout_logprobs.astype(np.float64),
        experts=experts,
    )
    found = version_scores(learner, ScoringJob(**responses_of(rows)), None, experts)
    np.testing.assert_array_equal(found["then"], live.astype(np.float64))
    np.testing.assert_array_equal(found["routed"], replayed.astype(np.float64))
    # A learner that trains with them has no routing term.
    trained = version_scores(learner, ScoringJob(**responses_of(rows), replayed=True), None, experts)
    np.testing.assert_array_equal(trained["then"], replayed.astype(np.float64))
    np.testing.assert_array_equal(trained["routed"], trained["then"])
    some = [1, 4, 5]
    chosen = experts[tokens_of(rows.tokens, some)]
    part = version_scores(learner, ScoringJob(**responses_of(rows)).part(some), None, chosen)
    here = np.isin(rows.row, some)
    np.testing.assert_allclose(part["routed"], found["routed"][here], atol=1e-5)
    trained_part = version_scores(learner, ScoringJob(**responses_of(rows), replayed=True).part(some), None, chosen)
    np.testing.assert_allclose(trained_part["then"], trained["then"][here], atol=1e-5)
    assert "routed" not in version_scores(learner, ScoringJob(**responses_of(rows)), None, None)
    write_experts(tmp_path, experts)
    again = read_experts(tmp_path)
    assert again is not None
    np.testing.assert_array_equal(again.ids, experts.ids)

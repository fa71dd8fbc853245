"""pass@k against counting, an interval that covers, and means of rewards."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations
from math import comb

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.data.batch import VERIFIER_FAILED, Completion, EpisodeFacts, Prompt, Sample, StopReason
from pipeline.rollout.evaluation import by_source, clustered_wilson, evaluate, pass_at_k, rewards, summarize, told_of
from tests.support.batches import batch_of_rewards, episode


@pytest.mark.parametrize(
    ("n", "c", "k", "expected"),
    [
        (10, 3, 1, 0.3),
        (10, 0, 5, 0.0),
        (10, 10, 1, 1.0),
        (4, 2, 2, 5 / 6),  # of 6 pairs, 1 has no correct sample
        (5, 1, 3, 3 / 5),
        (8, 3, 6, 1.0),  # fewer wrong ones than are drawn
        (200, 10, 100, 1 - comb(190, 100) / comb(200, 100)),
    ],
)
def test_goldens(n: int, c: int, k: int, expected: float) -> None:
    assert pass_at_k(n, c, k) == pytest.approx(expected, abs=1e-6)


@given(n=st.integers(1, 9), data=st.data())
def test_it_is_the_share_of_subsets_with_a_correct_sample(n: int, data: st.DataObject) -> None:
    c, k = data.draw(st.integers(0, n)), data.draw(st.integers(1, n))
    subsets = [any(sample < c for sample in subset) for subset in combinations(range(n), k)]
    assert pass_at_k(n, c, k) == pytest.approx(sum(subsets) / len(subsets), abs=1e-12)


def test_summary() -> None:
    summary = summarize([4, 2, 0], [4, 4, 4])
    assert summary["pass_at_1"] == pytest.approx(0.5)
    assert summary["pass_at_k"] == pytest.approx({"1": 0.5, "2": (1 + 5 / 6) / 3, "4": 2 / 3})
    assert summary["pass_at_1_low"] < 0.5 < summary["pass_at_1_high"]
    assert list(summarize([1], [6])["pass_at_k"]) == ["1", "2", "4", "6"]
    assert list(summarize([1], [1])["pass_at_k"]) == ["1"]
    with pytest.raises(ValueError, match="no prompts"):
        summarize([], [])


def test_interval_golden() -> None:
    """Ten prompts, each all right or all wrong: ten trials, whatever the samples. Wilson's interval for 5 of 10 is
    (0.2366, 0.7634), for 10 of 10 (0.7225, 1)."""
    assert clustered_wilson([8, 0] * 5, [8] * 10) == pytest.approx((0.2366, 0.7634), abs=0.02)
    assert clustered_wilson([8] * 10, [8] * 10) == pytest.approx((0.7225, 1.0), abs=1e-4)
    assert clustered_wilson([0] * 10, [8] * 10) == pytest.approx((0.0, 0.2775), abs=1e-4)
    # Prompts that do not differ at all are as good as independent samples: Wilson for 40 of 80.
    assert clustered_wilson([4] * 10, [8] * 10) == pytest.approx((0.39297, 0.60703), abs=1e-4)


@pytest.mark.parametrize("mean", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("concentration", [0.3, 3.0, 1000.0])
def test_the_interval_covers_although_samples_of_a_prompt_resemble_one_another(
    mean: float, concentration: float
) -> None:
    rng = np.random.default_rng(0)
    rates = rng.beta(mean * concentration, (1 - mean) * concentration, (400, 64))
    counts = rng.binomial(8, rates)
    covered = [low <= mean <= high for low, high in (clustered_wilson(row.tolist(), [8] * 64) for row in counts)]
    assert 0.92 <= np.mean(covered) <= 0.99


def rewarded(reward: float, **parts: float) -> Sample:
    return Sample(completion=Completion.given([1], [-0.5]), reward=reward, reward_parts=parts)


FAILED = rewarded(0.0, **{VERIFIER_FAILED: 1.0})


def test_a_sample_has_a_reward_as_its_batch_says() -> None:
    samples = [rewarded(1.0), rewarded(1.0, **{VERIFIER_FAILED: 0.0}), FAILED]
    failed = np.array([np.nan, 0.0, 1.0], np.float32)
    batch = replace(batch_of_rewards([[1.0, 1.0, 0.0]]), reward_parts={VERIFIER_FAILED: failed})
    assert [sample.judged for sample in samples] == batch.judged.tolist() == [True, True, False]


def test_a_sample_without_a_reward_is_in_no_mean() -> None:
    samples = [rewarded(1.0, right=1.0, brief=0.5), rewarded(0.25, right=0.0), FAILED]
    assert rewards(samples) == dict(reward_mean=0.625, reward_parts=dict(right=0.5, brief=0.5), verifier_failures=1)
    assert rewards([FAILED]) == dict(reward_parts={}, verifier_failures=1)


def test_a_sample_without_a_verdict_is_neither_right_nor_wrong() -> None:
    """Of 1, 1 of 2 and none of 0 judged samples that many are right; of the first prompt there is no pair."""
    right, wrong = rewarded(1.0), rewarded(0.0)
    found = evaluate([[right, FAILED], [right, wrong], [FAILED, FAILED]])
    assert (found["correct"], found["judged"], found["prompts"], found["samples"]) == ([1, 1, 0], [1, 2, 0], 3, 2)
    assert found["pass_at_k"] == pytest.approx({"1": 0.75})
    assert found["pass_at_1"] == pytest.approx(0.75)
    assert (found["pass_at_1_low"], found["pass_at_1_high"]) == clustered_wilson([1, 1], [1, 2])
    assert found["verifier_failures"] == 3
    alone = evaluate([[right, right], [right, wrong]])
    judged = evaluate([[right, right, FAILED], [right, wrong, FAILED]])
    assert {key for key in alone if alone[key] != judged[key]} == {"samples", "verifier_failures"}


@pytest.mark.parametrize(("short", "known"), [(1, True), (50, True), (51, False)])
def test_every_k_is_of_the_same_prompts(short: int, known: bool) -> None:
    """The verifier fails on one sample of the hardest prompts, which nobody solves: without them pass@8 would be 1."""
    right, wrong = rewarded(1.0), rewarded(0.0)
    easy, hard = [right, *[wrong] * 7], [FAILED, *[wrong] * 7]
    found = evaluate([*[easy] * (500 - short), *[hard] * short])["pass_at_k"]
    assert ("8" in found) == known
    assert found["4"] == pytest.approx(0.5 * (500 - short) / 500)
    assert not known or found["8"] == pytest.approx((500 - short) / 500)


@given(st.lists(st.tuples(st.integers(0, 8), st.integers(0, 8)), min_size=1, max_size=20))
def test_what_is_short_of_samples_makes_no_curve_fall_and_none_too_high(counts: list[tuple[int, int]]) -> None:
    correct, judged = [min(pair) for pair in counts], [max(pair) for pair in counts]
    curve = [*summarize(correct, judged).get("pass_at_k", {}).values()]
    assert curve == sorted(curve)
    assert bool(curve) == any(judged)


def test_a_verifier_that_always_failed_leaves_no_score() -> None:
    found = evaluate([[FAILED, FAILED], [FAILED, FAILED]])
    assert found == dict(prompts=2, samples=2, correct=[0, 0], judged=[0, 0], reward_parts={}, verifier_failures=4), (
        "not 0, which says that all are wrong"
    )


def test_a_source_has_its_own_means() -> None:
    answers = [[rewarded(1.0), rewarded(0.5)], [FAILED, FAILED], [rewarded(1.0), rewarded(1.0)]]
    assert by_source(["math", "chat", "math"], answers) == dict(
        math=dict(prompts=2, pass_at_1=0.75, reward_mean=0.875, verifier_failures=0),
        chat=dict(prompts=1, verifier_failures=2),
    )


def test_float_noise_does_not_decide_what_is_solved() -> None:
    noisy, low = rewarded(0.7 + 0.2 + 0.1), rewarded(0.9)
    assert evaluate([[noisy, low]])["correct"] == [1]
    assert evaluate([[noisy, low]], solved_at=0.9)["correct"] == [2], ".9 as float32 is below .9"
    assert by_source(["a"], [[low]], solved_at=0.9)["a"]["pass_at_1"] == 1.0


def test_an_episode_is_told_with_its_turns_and_why_it_stopped() -> None:
    facts = EpisodeFacts(stopped=StopReason.TURNS, turns=2, tool_calls=1)
    sample = episode([[5, 6], [7]], [[8, 9, 9]], prompt=[1], fork=1, facts=facts, reward=0.5)
    told = told_of(Prompt(group=3, text="p", answer="", tokens=(1,)), sample, "said")
    assert [told[name] for name in ("turns", "tool_calls", "stopped", "response_tokens")] == [2, 1, "turns", 3]
    alone = told_of(Prompt(group=3, text="p", answer="", tokens=(1,)), rewarded(1.0), "said")
    assert not {"turns", "tool_calls", "stopped"} & set(alone)

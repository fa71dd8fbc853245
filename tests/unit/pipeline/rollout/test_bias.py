"""Whether trained answers are shorter or easier than those that were issued: what is measured, and what is an alarm."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from pipeline.data.batch import Completion, Group, Prompt, Sample
from pipeline.rollout.batch_builder import BatchBuilder, GroupAllocator
from pipeline.rollout.bias import BiasWatch, Weighted, beyond_chance
from pipeline.trainer.batches import describe
from precision.mismatch.alarms import alarms
from tests.bench.composition import play
from tests.support.batches import batch_of_rewards

LONG, SHORT = 300, 20


def answered(
    index: int, groups: Sequence[tuple[int, Sequence[float]]], *, left_out: int | None = None, refills: int = 0
) -> BatchBuilder:
    """A finished batch of (length, rewards of its samples); a filter left out those with `left_out` tokens."""
    asks: Any = None
    builder = BatchBuilder(
        index=index,
        prompts=asks,
        allocator=GroupAllocator(0, ()),
        solved={},
        wanted=len(groups),
        max_refills=refills,
    )
    for place, (length, rewards) in enumerate(groups):
        completion = Completion.given([3] * length, [-0.5] * length)
        number = index * len(groups) + place
        group = Group(
            prompt=Prompt(group=number, text="", answer="", tokens=(1,)),
            samples=tuple(Sample(completion=completion, reward=reward) for reward in rewards),
        )
        builder.keep(group, turn=number, repeated=0, is_filtered=length == left_out)
    return builder


MIXED = [(LONG, (0.0, 1.0)), *[(SHORT, (0.0, 1.0))] * 15] * 8


def test_nothing_moved_where_all_that_was_issued_is_trained() -> None:
    found = BiasWatch(1).add(answered(0, MIXED), ())
    assert found["trained_shorter"] == found["trained_easier"] == 0.0
    assert found["trained_length_p10"] == found["issued_length_p10"] == SHORT
    assert found["trained_length_p90"] == found["issued_length_p90"] == LONG, "half of the tokens are of long answers"


def test_a_filter_that_leaves_out_long_answers_is_an_alarm() -> None:
    found = BiasWatch(1).add(answered(0, MIXED, left_out=LONG), ())
    assert found["trained_shorter"] == pytest.approx(0.5), "half of the tokens are of long answers"
    assert (found["trained_length_p90"], found["issued_length_p90"]) == (SHORT, LONG)
    assert found["trained_easier"] == 0.0


def test_a_filter_that_leaves_out_hard_prompts_is_an_alarm() -> None:
    hard_and_easy = [(LONG, (0.0, 0.25)), (LONG + 1, (0.75, 1.0))] * 32
    found = BiasWatch(1).add(answered(0, hard_and_easy, left_out=LONG), ())
    assert found["trained_easier"] == pytest.approx(0.5, abs=0.01)
    assert found["trained_shorter"] == 0.0, "they are longer"
    assert (found["trained_reward_p50"], found["issued_reward_p10"]) == (0.875, 0.125)


def test_groups_that_dynamic_sampling_drops_count_nowhere() -> None:
    groups = [(LONG, (0.0, 0.0)), (SHORT, (0.0, 1.0))] * 32
    builder = answered(0, groups, refills=1)
    builder.wanted = 32
    builder.fill_up()
    assert len(builder.dropped) == len(builder.kept) == 32
    found = BiasWatch(1).add(builder, ())
    assert found["trained_shorter"] == found["trained_easier"] == 0.0


@pytest.mark.parametrize("seed", range(3))
def test_early_batches_of_groups_as_they_come_are_an_alarm(seed: int) -> None:
    seen = play(math.inf, 4, 0.05, seed, prompts=64, slots=64, steps=8).alarms
    assert "trained_shorter" in [name for _, name in seen]


@pytest.mark.parametrize("window", [0.0, 0.3])
def test_batches_that_wait_are_no_alarm(window: float) -> None:
    assert play(64 * window, 4, 0.05, 2, prompts=64, slots=64, steps=8).alarms == ()


@pytest.mark.slow
@pytest.mark.parametrize(("prompts", "slots"), [(16, 4), (64, 64)])
@pytest.mark.parametrize("window", [0.0, 0.3])
def test_no_alarm_in_twenty_runs_of_batches_that_wait(window: float, prompts: int, slots: int) -> None:
    for seed in range(20):
        assert play(prompts * window, 4, 0.05, seed, prompts=prompts, slots=slots, steps=16).alarms == (), (
            f"seed {seed}"
        )


def test_chance_alone_seldom_moves_anything() -> None:
    """On independent sets of which neither is biased; weights are as unequal as those of long and short answers."""
    rng = np.random.default_rng(0)

    def drawn() -> Weighted:
        lengths = np.where(rng.random(400) < 0.05, 600.0, rng.integers(10, 31, 400))
        return lengths, lengths

    beyond = [beyond_chance(drawn(), drawn()) > 0 for _ in range(1000)]
    assert sum(beyond) <= 25


def test_a_batch_that_is_made_again_begins_anew() -> None:
    watch = BiasWatch(1)
    watch.add(answered(7, MIXED), ())
    assert watch.add(answered(3, MIXED, left_out=LONG), ())["trained_shorter"] == pytest.approx(0.5)


def test_a_line_of_metrics_has_what_the_batch_says() -> None:
    line = describe(replace(batch_of_rewards([[0.0, 1.0]]), bias=dict(trained_shorter=0.25, trained_easier=0.0)), 0)
    (alarm,) = alarms(line, quantized=False)
    assert alarm.rule.name == "trained_shorter"
    assert "is 0.25, above 0.1" in alarm.text

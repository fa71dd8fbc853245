from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from megatron_bridge.step.optimizer import LearningRates, RateSpan, learning_rate, take_step
from pipeline.config.recipe import OptimizerSection


def rates(steps: int, **section: Any) -> list[float]:
    return [learning_rate(step, OptimizerSection(lr=1.0, **section), steps) for step in range(steps)]


def test_warm_up_reaches_the_rate_at_its_last_step() -> None:
    assert rates(6, warmup_steps=4) == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


def test_linear_decay_ends_at_the_minimum() -> None:
    assert rates(5, warmup_steps=0, decay="linear", min_lr=0.2) == pytest.approx([1.0, 0.8, 0.6, 0.4, 0.2])


def test_cosine_decay_is_half_way_in_the_middle() -> None:
    assert rates(5, warmup_steps=2, decay="cosine") == pytest.approx([0.5, 1.0, 1.0, 0.5, 0.0])


def test_a_decay_that_ends_where_it_says_does_not_depend_on_the_steps_of_the_run() -> None:
    short, long = (rates(steps, warmup_steps=1, decay="cosine", decay_steps=8) for steps in (5, 10))
    assert short == long[:5]
    assert long[7:] == [0.0] * 3


def test_steps_keep_their_rates_when_the_settings_change() -> None:
    sections = [OptimizerSection(lr=lr, warmup_steps=0, decay="linear") for lr in (1.0, 0.5)]
    spans = LearningRates((RateSpan(0, sections[0], 5), RateSpan(3, sections[1], 9)))
    assert [spans.at(batch, batch) for batch in range(9)] == [
        1.0,
        0.75,
        0.5,
        *(0.5 * (1.0 - step / 8) for step in range(3, 9)),
    ]


@pytest.mark.parametrize(("before", "after"), [(4, 1), (1, 4), (3, 2)])
@pytest.mark.parametrize("warmup_steps", [0, 10])
def test_a_fork_with_another_number_of_steps_a_batch_ends_the_decay_with_its_last_batch(
    before: int, after: int, warmup_steps: int
) -> None:
    section = OptimizerSection(lr=1.0, warmup_steps=warmup_steps, decay="linear")
    spans = LearningRates((RateSpan(0, section, 100 * before, before), RateSpan(80, section, 100 * after, after)))
    parent = [spans.at(step // before, step) for step in range(80 * before)]
    fork = [spans.at(80 + step // after, 80 * before + step) for step in range(20 * after)]
    assert parent == [learning_rate(step, section, 100 * before) for step in range(80 * before)]
    steepest = 1.0 / (100 * min(before, after) - 1 - warmup_steps)
    assert 0.0 <= parent[-1] - fork[0] <= steepest + 1e-12
    assert sorted({*fork}, reverse=True) == fork
    assert fork[-1] == 0.0
    assert fork[-2] > 0.0


def test_where_a_decay_ends_by_its_own_words_a_fork_s_steps_count_on() -> None:
    section = OptimizerSection(lr=1.0, warmup_steps=0, decay="linear", decay_steps=341)
    spans = LearningRates((RateSpan(0, section, 400, 4), RateSpan(80, section, 100, 1)))
    assert [spans.at(79, 319), spans.at(80, 320)] == pytest.approx([1.0 - 319 / 340, 1.0 - 320 / 340])
    warmer = OptimizerSection(lr=1.0, warmup_steps=330, decay="linear")
    spans = LearningRates((RateSpan(0, warmer, 400, 4), RateSpan(80, warmer, 100, 1)))
    assert [spans.at(80, 320), spans.at(89, 329), spans.at(99, 339)] == pytest.approx([321 / 330, 1.0, 0.0])


def test_a_run_that_is_all_warm_up() -> None:
    assert rates(2, warmup_steps=5, decay="cosine") == [0.2, 0.4]


def test_multipliers_of_groups_are_kept() -> None:
    groups: list[dict[str, Any]] = [{"wd_mult": 1.0, "lr_mult": 1.0}, {"wd_mult": 0.0, "lr_mult": 0.5}]
    steps = list[int]()
    optimizer = SimpleNamespace(
        param_groups=groups, chained_optimizers=[], step_with_ready_grads=lambda: steps.append(1)
    )
    take_step(optimizer, OptimizerSection(weight_decay=0.01), 0.1, 1.0)
    assert steps == [1]
    assert [(g["lr"], g["weight_decay"]) for g in groups] == [(0.1, 0.01), (0.05, 0.0)]

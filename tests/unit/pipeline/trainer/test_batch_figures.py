"""What a step's line of metrics says about its batch."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from pipeline.data.batch import VERIFIER_FAILED, DroppedGroup
from pipeline.trainer.batch_figures import asked_solve_rate, describe
from tests.support.batches import batch_of_rewards

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


def test_parts_are_means_over_the_samples_that_have_them() -> None:
    parts = FAILED | {"format": np.array([1.0, 0.0, NAN, NAN], np.float32), "all": np.full(4, 3.0, np.float32)}
    found = describe(replace(batch_of_rewards([[1.0, 0.5], [1.0, 0.0]]), reward_parts=parts), step=0)
    assert found["reward_parts"] == {"format": 0.5, "all": 3.0}


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


def test_what_solves_is_the_recipe_s() -> None:
    batch = replace(batch_of_rewards([[0.9, 0.0], [0.9, 0.9]]), repeated=3)
    assert describe(batch, step=0)["solve_rate"] == asked_solve_rate(batch) == 0.0
    assert describe(batch, step=0, solved_at=0.9)["solve_rate"] == asked_solve_rate(batch, 0.9) == 0.75
    assert describe(batch, step=0)["repeated_samples"] == 3.0

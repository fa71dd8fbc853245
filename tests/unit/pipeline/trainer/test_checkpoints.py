"""A checkpoint brings back what the loop must remember, or refuses to."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pipeline.errors import CorruptCheckpointError
from pipeline.trainer.checkpoints import Checkpoints


class Learner:
    is_rank_zero = True

    def save(self, directory: Path) -> None:
        (directory / "shard").write_text("weights")

    def load(self, directory: Path) -> None:
        assert (directory / "shard").read_text() == "weights"

    def barrier(self) -> None:
        pass


def test_the_loops_state_comes_back_with_its_step(tmp_path: Path) -> None:
    learner: Any = Learner()
    checkpoints = Checkpoints(tmp_path, keep=2)
    assert checkpoints.restore(learner) == (0, {})
    for step in (4, 8):
        checkpoints.save(learner, step, {"entropy": 0.1 + step, "solve_rate": 0.3})
    assert checkpoints.restore(learner) == (8, {"entropy": 8.1, "solve_rate": 0.3})


def test_a_state_that_was_touched_is_refused(tmp_path: Path) -> None:
    learner: Any = Learner()
    checkpoints = Checkpoints(tmp_path, keep=2)
    checkpoints.save(learner, 4, {"entropy": 1.0})
    (tmp_path / "000004" / "loop_state.json").write_text('{"entropy": 2.0}\n')
    with pytest.raises(CorruptCheckpointError, match=r"loop_state\.json"):
        checkpoints.restore(learner)


def test_a_checkpoint_without_a_state_is_of_a_loop_without_memory(tmp_path: Path) -> None:
    """As `evenkeel sft` and earlier versions wrote them."""
    learner: Any = Learner()
    checkpoints = Checkpoints(tmp_path, keep=2)
    checkpoints.save(learner, 4, {})
    assert checkpoints.restore(learner) == (4, {})

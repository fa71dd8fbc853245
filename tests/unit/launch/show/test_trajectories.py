"""What `evenkeel trajectories show` says about a run that is not as it should be."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from launch.convert.new_model import new_model
from pipeline.data.run_directory import RunDirectory
from pipeline.data.store import BatchStore
from tests.support.batches import batch_of_rewards
from tests.support.runs import evenkeel
from tests.support.written_runs import write_run


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    new_model(tmp_path / "base", hidden=16, layers=1, heads=2, kv_heads=1, head_dim=8, ffn=16)
    found = RunDirectory(write_run(tmp_path, 1, steps=1, overrides=dict(model=dict(path=str(tmp_path / "base")))))
    BatchStore(found.batches).commit(batch_of_rewards([[1.0, 0.0]], vocabulary=40))
    return found


def test_log_probabilities_of_another_length_are_named(run: RunDirectory) -> None:
    run.write_learner_logprobs(0, np.zeros(1000, np.float32))
    done = evenkeel("trajectories", "show", run.path, 0)
    assert done.returncode == 1
    assert done.stderr.startswith(f"error: {run.logprobs}/000000.npy holds 1000 log-probabilities, but its batch has ")
    assert done.stderr.count("\n") == 1


def test_a_batch_that_is_not_there(run: RunDirectory) -> None:
    done = evenkeel("trajectories", "show", run.path, 7)
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert "batch 7 is not committed" in done.stderr


def test_a_run_that_is_a_file(run: RunDirectory) -> None:
    done = evenkeel("report", run.path / "recipe.yaml")
    assert done.stderr.startswith(f"error: {run.path}/recipe.yaml is no folder")

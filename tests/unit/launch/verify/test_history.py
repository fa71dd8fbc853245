"""`evenkeel verify history` judges by the lags that held."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np

from launch.verify.history import check_history
from pipeline.config.recipe import Recipe
from pipeline.control.files import ControlFiles, ControlRecord
from pipeline.data.run_directory import RunDirectory, unfenced
from pipeline.data.store import BatchStore
from precision.controller.policy import Evidence, State
from tests.support.batches import batch_of_rewards


def test_tokens_staler_than_the_decided_lag_are_found(tmp_path: Path) -> None:
    data = dict(
        run=dict(name="x", root=str(tmp_path), steps=3),
        model=dict(path="m"),
        task=dict(name="sort_digits"),
        schedule=dict(kind="async", lag=2),
        controller=dict(),
    )
    run = RunDirectory(tmp_path / "x")
    run.freeze(Recipe.model_validate(data))
    for index in range(3):
        batch = batch_of_rewards([[1.0, 0.0]], index=index)
        versions = np.zeros(batch.num_response_tokens, np.int32)
        BatchStore(run.batches).commit(replace(batch, policy_version=versions))
    assert check_history(run.path)["version_violations"] == 0
    record = ControlRecord(step=1, evidence=Evidence(step=1, loss=0.0), state=State(), lags=((2, 1),))
    ControlFiles(run.control, unfenced).create(record)
    assert check_history(run.path)["version_violations"] == batch.num_response_tokens

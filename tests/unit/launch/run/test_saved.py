"""What is said to whoever ends a run before its last step."""

from __future__ import annotations

from pathlib import Path

import pytest

from launch.run.processes import saying_what_is_saved, what_is_saved
from pipeline.data.run_directory import RunDirectory


def run_with(folder: Path, batches: int, checkpoints: tuple[int, ...]) -> RunDirectory:
    run = RunDirectory(folder)
    run.make_folders()
    for index in range(batches):
        (run.batches / f"{index:06d}.zarr.zip").touch()
    for step in checkpoints:
        (run.checkpoints / f"{step:06d}").mkdir()
        (run.checkpoints / f"{step:06d}/COMMIT").touch()
    return run


@pytest.mark.parametrize(
    ("batches", "checkpoints", "said"),
    [
        (0, (), "holds no checkpoint yet; the same command begins again"),
        (1, (), "holds 1 batch and no checkpoint yet; the same command goes on from there"),
        (12, (5, 10), "holds 12 batches and the checkpoint of step 10 of 20; the same command goes on from there"),
    ],
)
def test_what_is_saved(tmp_path: Path, batches: int, checkpoints: tuple[int, ...], said: str) -> None:
    assert what_is_saved(run_with(tmp_path, batches, checkpoints), 20) == f"{tmp_path} {said}"


def test_an_end_at_once_carries_it(tmp_path: Path) -> None:
    with (
        pytest.raises(KeyboardInterrupt, match="the checkpoint of step 3 of 8"),
        saying_what_is_saved(run_with(tmp_path, 4, (3,)), 8),
    ):
        raise KeyboardInterrupt

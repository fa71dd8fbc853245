"""RUN/mismatch/NNNNNN.zarr.zip: readable with plain Zarr, whole or not there, never from a superseded learner."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import zarr

from pipeline.data import mismatch_files
from pipeline.data.mismatch_files import write_mismatch
from pipeline.data.run_directory import RunDirectory
from pipeline.errors import SupersededError
from precision.mismatch.statistics import Mismatch
from tests.support.mismatch_reference import random_tokens

MEASURED = Mismatch.of_step(random_tokens(0, [40, 3, 200]))


def run_in(folder: Path) -> RunDirectory:
    run = RunDirectory(folder)
    run.make_folders()
    return run


def test_plain_zarr_reads_it_by_name(tmp_path: Path) -> None:
    write_mismatch(run_in(tmp_path), 12, MEASURED)
    with zarr.storage.ZipStore(tmp_path / "mismatch" / "000012.zarr.zip", mode="r") as store:
        group = zarr.open_group(store, mode="r")
        names = {key: list(value) for key, value in group.attrs.items() if isinstance(value, list)}
        statistics, quantiles = group["statistics"][:], group["quantiles"][:]
        assert statistics.shape == (1, len(names["groups"]), len(names["statistics"]))
        assert quantiles.shape == (1, len(names["groups"]), len(names["quantiles"]))
        assert group["histogram"].shape == (1, len(names["groups"]), len(names["histogram_edges"]) + 1)
        assert group["sums"].shape == (1, len(names["groups"]), len(names["sums"]))
        assert group["sequences"].shape == (3, len(names["sequence_columns"]))
        assert group["update"][:].tolist() == [0, 0, 0]
        assert group.attrs["step"] == 12
        row = names["groups"].index("entropy/0.1-0.3")
        ess = statistics[0, row, names["statistics"].index("ess")]
    assert ess == MEASURED.group("entropy/0.1-0.3").statistics()["ess"]
    np.testing.assert_array_equal(quantiles, MEASURED.quantiles)


def test_a_step_that_is_trained_again_replaces_its_file(tmp_path: Path) -> None:
    run = run_in(tmp_path)
    write_mismatch(run, 3, MEASURED)
    path = run.mismatch / "000003.zarr.zip"
    first = path.read_bytes()
    write_mismatch(run, 3, MEASURED)
    assert path.read_bytes() == first
    write_mismatch(run, 3, Mismatch.of_step(random_tokens(1, [40])))
    assert path.read_bytes() != first


def test_nothing_is_written_behind_the_fence(tmp_path: Path) -> None:
    def fence() -> None:
        raise SupersededError("a later learner has taken over")

    run = run_in(tmp_path)
    with pytest.raises(SupersededError):
        write_mismatch(RunDirectory(tmp_path, fence), 0, MEASURED)
    assert list(run.mismatch.iterdir()) == []


def test_half_a_file_is_never_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full_disk(*_: object) -> None:
        raise OSError("no space left")

    run = run_in(tmp_path)
    monkeypatch.setattr(mismatch_files, "write_zarr_zip", full_disk)
    with pytest.raises(OSError, match="no space"):
        write_mismatch(run, 0, MEASURED)
    assert list(run.mismatch.iterdir()) == []

"""What a version is verified by: kept in the policy folder, compared in nats."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from pipeline.errors import StoreError
from pipeline.ports.weights import WEIGHT_CHECK_FILE, Probe, WeightCheck, mean_gap_nats, probe_rows

PROBE = Probe(rows=((1, 2, 3), (4, 5)), logprobs=((-1.0, -2.5), (-0.1234567,)), max_mean_gap_nats=0.25)


def test_a_check_comes_back_from_its_folder_as_it_was(tmp_path: Path) -> None:
    for check in (
        WeightCheck(version=3, probe=PROBE, digests=({"a": "00ff"}, {"a": "11ff"})),
        WeightCheck(version=0, digests=({"a": "00ff"},)),
        WeightCheck(version=4, probe=replace(PROBE, quantized=((-1.1, -2.4), (-0.2,)))),
    ):
        check.save(tmp_path)
        assert WeightCheck.load(tmp_path, check.version) == check
    assert [path.name for path in tmp_path.iterdir()] == [WEIGHT_CHECK_FILE]


def test_a_folder_that_is_there_has_a_check_of_its_own_version(tmp_path: Path) -> None:
    assert WeightCheck.load(tmp_path / "missing", 6) is None
    with pytest.raises(StoreError, match=r"weight_check\.json is missing: nothing says of which version"):
        WeightCheck.load(tmp_path, 6)
    WeightCheck(version=5).save(tmp_path)
    with pytest.raises(StoreError, match="holds version 5, expected 6; stop the run and repair it"):
        WeightCheck.load(tmp_path, 6)


@pytest.mark.parametrize("text", ["", "[]", '{"version": 1}', '{"version": 1, "probe": {"rows": 3}, "digests": []}'])
def test_a_damaged_proof_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / WEIGHT_CHECK_FILE).write_text(text)
    with pytest.raises(StoreError, match=r"weight_check\.json is damaged"):
        WeightCheck.load(tmp_path, 1)


def test_the_gap_is_the_mean_over_all_tokens() -> None:
    engine = [np.array([-1.5, -2.5], np.float32), np.array([-0.1234567], np.float32)]
    assert mean_gap_nats(PROBE.logprobs, engine) == pytest.approx(0.5 / 3)


@pytest.mark.parametrize("bad", [math.nan, -math.inf])
def test_what_is_not_finite_is_infinitely_far(bad: float) -> None:
    assert mean_gap_nats(PROBE.logprobs, [np.array([bad, -2.5], np.float32), np.array([-0.1], np.float32)]) == math.inf


def test_other_shapes_are_refused() -> None:
    with pytest.raises(ValueError, match="argument"):
        mean_gap_nats(PROBE.logprobs, [np.zeros(2, np.float32)])
    with pytest.raises(ValueError, match="broadcast"):
        mean_gap_nats(PROBE.logprobs, [np.zeros(3, np.float32), np.zeros(1, np.float32)])


def test_probe_rows_are_fixed_and_plain() -> None:
    rows = probe_rows(40, {0, 1}, 5)
    assert rows == probe_rows(40, {0, 1}, 5)
    assert rows != probe_rows(40, {0, 1}, 6)
    assert {len(row) for row in rows} == {32}
    assert set().union(*rows) <= set(range(2, 40))
    assert len(probe_rows(40, (), 0, num_rows=9, row_tokens=3)) == 9

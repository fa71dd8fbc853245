"""What the first lines of docs/evidence.md advise follows the numbers."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from tests.evidence.matrix import read_matrix
from tests.evidence.practice import practice
from tests.evidence.results import Result, save
from tests.evidence.robust_table import MATRIX
from tests.support.evidence import a_result


def kept(folder: Path, name: str, condition: str, ends: dict[str, int], seeds: int = 1) -> list[Result]:
    """So many of ten answers right at the end, one more with each seed; added to what the file has."""
    results = [
        a_result(arm, seed, [[end + seed - 1]], condition=condition)
        for seed in range(1, seeds + 1)
        for arm, end in ends.items()
    ]
    save(folder / f"{name}.json", results)
    return results


def test_nothing_measured_is_nothing_advised(tmp_path: Path) -> None:
    assert practice(tmp_path) == []
    kept(tmp_path, "robust-lag8", "fp32", dict(cispo=1, cispo_age=8))
    assert practice(tmp_path) == [], "the control that decides is missing"


@pytest.mark.parametrize(
    ("lowest", "said"),
    [
        (
            9,
            "disagree: CISPO, cap 5, with smaller steps where samples are old.** Over 9 conditions of age, rollout "
            "format and temperature 1 of 2 arms end at .80 or more of the best arm in each; worst shares: CISPO, "
            "cap 5, by age .90. Keys of the first: `objective: {name: cispo, cap: 5.0}`, "
            "`learner.optimizer.lr_by_lag: sqrt`.",
        ),
        (5, "no arm ends at .80 or more of the best arm in each; the nearest: CISPO, cap 5, by age .50. Keys"),
    ],
)
def test_what_to_take_where_nothing_is_known(tmp_path: Path, lowest: int, said: str) -> None:
    matrix = read_matrix(MATRIX)
    for name, experiment in matrix.experiments.items():
        arms = dict(cispo=10, grpo_02=4) if name == "fresh" else dict(cispo_age=10, grpo_02=4, grpo_06=10)
        ends = {condition: dict(arms) for condition in experiment.conditions}
        if name == "lag8":
            ends["fp4"]["cispo_age"] = lowest
        rows = [a_result(arm, 1, [[end]], condition=key) for key, row in ends.items() for arm, end in row.items()]
        save(tmp_path / f"robust-{name}.json", rows)
    assert said in practice(tmp_path)[0]


@pytest.mark.parametrize(
    ("ends", "said", "not_said"),
    [
        (dict(cispo=1, cispo_age=8, cispo_const=8), ["take smaller steps", ".10 at", "at .80 with"], ["full rate ("]),
        (dict(cispo=8, cispo_age=8, cispo_const=7), ["no smaller steps"], ["take smaller"]),
        (dict(cispo=1, cispo_age=8, cispo_const=5), ["take smaller steps", "age counts"], ["matters less"]),
        (
            dict(cispo=1, cispo_age=8, cispo_const=8, split=9, split_age=4, split_const=7, decoupled=9),
            ["2 objectives", "between .10 and .90", "highest: split", "between .70 and .80", "lower with them: split"],
            ["decoupled"],
        ),
    ],
)
def test_old_samples(tmp_path: Path, ends: dict[str, int], said: list[str], not_said: list[str]) -> None:
    kept(tmp_path, "robust-lag8", "fp32", ends)
    (line,) = practice(tmp_path)
    assert all(words in line for words in [*said, "One seed: a screen."]), line
    assert not any(words in line for words in not_said), line


def test_seeds_are_counted_where_they_are_quoted(tmp_path: Path) -> None:
    one = kept(tmp_path, "robust-lag8", "fp32", dict(cispo=1, cispo_age=8, cispo_const=7))
    others = [a_result("cispo", 2, [[3]], condition="fp32"), a_result("p3o", 1, [[3]], condition="fp8")]
    save(
        tmp_path / "robust-lag8.json",
        [*one, *others, *(a_result("p3o", seed, [[3]], condition="fp4") for seed in range(5))],
    )
    (line,) = practice(tmp_path)
    assert "1 to 2 seeds; run-to-run standard deviation .06." in line


@pytest.mark.parametrize(("clip", "said"), [(2, "no clip of 0.2"), (7, "a clip of 0.2 will do")])
def test_engines_that_sample_otherwise(tmp_path: Path, clip: int, said: str) -> None:
    hot = kept(tmp_path, "robust-fresh", "t12", dict(grpo_02=clip, cispo=7, p3o=6), seeds=2)
    fp8 = kept(tmp_path, "robust-fresh", "fp8", dict(grpo_02=clip, cispo=6, p3o=7), seeds=2)
    save(tmp_path / "robust-fresh.json", hot + fp8)
    (line,) = practice(tmp_path)
    assert said in line
    assert "the best arm at .75 and .75" in line
    assert "between .65 and .75" in line
    assert "2 seeds; run-to-run standard deviation .07." in line


@pytest.mark.parametrize(("power", "said"), [(6, "no gain at the end"), (9, "a gain at the end")])
def test_whose_gradient_counts(tmp_path: Path, power: int, said: str) -> None:
    kept(tmp_path, "credit_hard", "fp32", dict(grpo=6, power=power, fade=5))
    assert practice(tmp_path) == [], "an arm is missing"
    kept(tmp_path, "credit_hard", "fp32", dict(grpo=6, power=power, fade=5, fade_target=1), seeds=2)
    (line,) = practice(tmp_path)
    assert said in line
    assert "at .15 (.89). 2 seeds" in line


def test_stages_and_formats(tmp_path: Path) -> None:
    kept(tmp_path, "staged", "fp32", dict(sync=8, clip=6, veto=5))
    cells = [("fp8_block", False, 0.99), ("fp8_block", True, 1.0)]
    cells += [("emulated_mxfp4", False, 0.84), ("emulated_fp4", False, 0.88)]
    rows = [dict(precision=name, follows=follows, ess=ess) for name, follows, ess in cells]
    (tmp_path / "formats.json").write_text(json.dumps(rows))
    stages, formats = practice(tmp_path)
    assert "no gain at the end was seen" in stages
    assert "between .50 and .60" in stages
    assert "an ESS of 0.990, formats of 4 bits .84 to .88" in formats
    kept(tmp_path, "staged", "fp32", dict(sync=8, clip=9))
    assert "a gain at the end was seen" in practice(tmp_path)[0]


@pytest.mark.parametrize(("late", "said"), [(0, "the first quarter is enough"), (80, "undecided")])
def test_a_forecast(tmp_path: Path, late: int, said: str) -> None:
    """A sigmoid of the samples in a hundred answers; in the second case the end falls, which the beginning
    did not show."""
    versions = np.arange(25)
    right = 10 + 80 / (1 + (6.0 / np.maximum(versions, 1e-9)) ** 2) - np.where(versions > 18, late, 0)
    scores = [[int(one) for one in row] for row in np.round(right)[:, None]]
    save(tmp_path / "scaling.json", [a_result("cispo", 1, scores, samples=100, condition="fp32")])
    (line,) = practice(tmp_path)
    assert said in line

"""Names that MLflow takes; test_export.py has it take some."""

from __future__ import annotations

import posixpath
import re

import pytest

from launch.export.mlflow_names import mlflow_name


@pytest.mark.parametrize("name", ["train/reward_mean", "evaluation/pass_at_k/8", "reward_parts/größe.2 - x:y", "step"])
def test_what_it_takes_stays(name: str) -> None:
    assert mlflow_name(name) == name


@pytest.mark.parametrize(
    ("name", "begins"),
    [
        ("reward_parts/pass@1", "reward_parts/pass_1-"),
        ("reward_parts/f1+bonus", "reward_parts/f1_bonus-"),
        ("reward_parts/len=4", "reward_parts/len_4-"),
        ("reward_parts/a//b", "reward_parts/a/_/b-"),
        ("reward_parts/a/", "reward_parts/a/_-"),
        ("reward_parts/a/../b", "reward_parts/a/_/b-"),
    ],
)
def test_what_it_refuses_is_replaced(name: str, begins: str) -> None:
    made = mlflow_name(name)
    assert re.fullmatch(re.escape(begins) + "[0-9a-f]{6}", made)
    assert re.fullmatch(r"[/\w.\- :]*", made), "MLflow's pattern"
    assert posixpath.normpath(made) == made, "and it takes no path that could be written shorter"


def test_names_that_differ_stay_apart() -> None:
    names = ["pass@1", "pass+1", "pass=1", "pass_1", "a//b", "a/./b", "a/../b", "a/_/b", "a/b"]
    assert len({mlflow_name(name) for name in names}) == len(names)

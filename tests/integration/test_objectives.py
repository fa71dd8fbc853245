"""Every objective and correction on real Megatron-Core learners: the layout must not change the step.

Whole responses are cut by context parallelism, spread by data parallelism and packed into micro-batches, so an
objective that looked at its micro-batch for a sequence ratio, a veto or a second moment would differ here. Responses
hold tokens that were never sampled, and some steps leave samples out.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from launch.convert.new_model import new_model
from tests.integration.workers.objectives_worker import measure
from tests.support.ranks import run_ranks

EVERYDAY = {1: ["one×MB1", "one"], 2: ["CP2"]}
FURTHER = ["DP2", "PP2"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Results of the layouts of every day."""
    folder = tmp_path_factory.mktemp("objectives")
    new_model(folder / "model", hidden=32, layers=2, head_dim=16, ffn=64, seed=1)
    new_model(folder / "reference", hidden=32, layers=2, head_dim=16, ffn=64, seed=2)
    for ranks, layouts in EVERYDAY.items():
        run_ranks(ranks, measure, folder, layouts)
    return folder


def found(folder: Path, layout: str) -> tuple[dict[str, dict[str, float]], dict[str, Any]]:
    return json.loads((folder / f"{layout}.json").read_text()), dict(np.load(folder / f"{layout}.npz"))


@pytest.fixture(scope="module")
def further(folder: Path) -> Path:
    """Results of the others too."""
    run_ranks(2, measure, folder, FURTHER)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("layout", FURTHER)
def test_no_further_layout_changes_a_step(further: Path, layout: str) -> None:
    test_no_layout_changes_a_step(further, layout)


@pytest.mark.parametrize("layout", ["one", "CP2"])
def test_no_layout_changes_a_step(folder: Path, layout: str) -> None:
    metrics, changes = found(folder, layout)
    expected, expected_changes = found(folder, "one×MB1")
    assert metrics.keys() == expected.keys()
    for name, row in expected.items():
        theirs = {key: value for key, value in metrics[name].items() if key != "padding_share"}
        ours = {key: value for key, value in row.items() if key != "padding_share"}
        assert theirs == pytest.approx(ours, rel=2e-4, abs=2e-6), name
        change = np.abs(changes[name] - expected_changes[name]).max() / np.abs(expected_changes[name]).max()
        assert change < 2e-3, f"{name}: weights move {change:.1e} differently"


def test_objectives_differ_and_act(folder: Path) -> None:
    """Guards the comparison above: steps are not zero, vetoes and corrections bite."""
    metrics, changes = found(folder, "one")
    assert all(np.abs(change).max() > 1e-5 for change in changes.values())
    assert not np.allclose(changes["clipped"], changes["tis"], atol=1e-6)
    assert metrics["p3o"]["num_tokens"] < 16 * 40  # tokens that were not sampled are not counted
    assert metrics["near k3"]["kl_to_reference"] > 1e-4
    assert not np.allclose(changes["near k3"], changes["cispo"], atol=1e-6)
    assert 0 < metrics["mu_grpo"]["veto_tokens"] < 1


def test_leaving_samples_out_is_running_them_without_advantage(folder: Path) -> None:
    """The denominator does not shrink, and whole-step decisions still see all samples."""
    metrics, changes = found(folder, "one")
    for name in ("cispo", "gspo", "tis"):
        left_out, zeros = f"{name} left out", f"{name} zeros"
        assert metrics[left_out]["num_tokens"] == metrics[zeros]["num_tokens"]
        assert metrics[left_out]["loss"] == pytest.approx(metrics[zeros]["loss"], rel=1e-5, abs=1e-7)
        assert metrics[left_out]["known_logprobs"] == 1.0  # scored, if not trained
        np.testing.assert_allclose(changes[left_out], changes[zeros], atol=1e-7)
        assert not np.allclose(changes[left_out], changes[name], atol=1e-6)


@pytest.mark.parametrize("variant", ["", " left out", " zeros"])
def test_means_are_over_what_was_run_through_the_model(folder: Path, variant: str) -> None:
    """Samples that were left out are in no sum, so they are in no mean's denominator either."""
    metrics = found(folder, "one")[0][f"cispo{variant}"]
    assert metrics["weight"] == pytest.approx(metrics["weight_by_hand"], rel=1e-6)
    assert metrics["k3"] == pytest.approx(metrics["k3_kl"], rel=1e-4)

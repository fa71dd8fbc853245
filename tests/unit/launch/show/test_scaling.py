"""`evenkeel scaling`: the JSON that scripts read, the tables that people read, pictures, and one-line errors."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from launch.cli import app

ROOT = Path(__file__).parents[4]
KEYS = {"A", "B", "C_mid", "A_interval", "B_interval", "C_mid_interval", "identifiable", "R_0", "residual_std"}


def write(path: Path, midpoint: float, exponent: float, asymptote: float, reach: float = 4.0, seed: int = 0) -> Path:
    """Evaluations of a curve that starts at .35, noise within ±.003, as {"gpu_hours", "reward"}."""
    compute = np.linspace(0.0, reach * midpoint, 41)
    with np.errstate(divide="ignore"):
        score = 0.35 + (asymptote - 0.35) / (1.0 + (midpoint / compute) ** exponent)
    score += np.random.default_rng(seed).uniform(-0.003, 0.003, 41)
    lines = (dict(gpu_hours=float(c), reward=float(r)) for c, r in zip(compute, score, strict=True))
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return path


@pytest.fixture
def scale_rl(tmp_path: Path) -> Path:
    return write(tmp_path / "scale_rl.jsonl", 2542, 1.92, 0.610)


@pytest.fixture
def batch_512(tmp_path: Path) -> Path:
    return write(tmp_path / "batch_512.jsonl", 2818, 1.77, 0.605, seed=1)


def invoke(*arguments: object) -> str:
    done = CliRunner().invoke(app, ["scaling", *map(str, arguments), "--x", "gpu_hours", "--y", "reward"])
    if done.exception is not None:
        raise done.exception
    return done.stdout


def answer(*arguments: object) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads(invoke(*arguments, "--json").splitlines()[-1])
    return loaded


def test_fit_as_json(scale_rl: Path) -> None:
    result = answer(scale_rl)
    assert set(result) >= KEYS
    assert result["A"] == pytest.approx(0.610, abs=0.01)
    assert result["B"] == pytest.approx(1.92, rel=0.1)
    assert result["C_mid"] == pytest.approx(2542, rel=0.08)
    assert result["A_interval"][0] <= result["A"] <= result["A_interval"][1]
    assert result["identifiable"] is True
    assert result["R_0"] == pytest.approx(0.35, abs=0.006)
    assert result["residual_std"] < 0.003
    assert (result["num_points"], result["runs"], result["warnings"]) == (40, ["scale_rl"], [])
    assert result["C_range"] == pytest.approx([4 * 2542 / 40, 4 * 2542])


def test_forecast(scale_rl: Path) -> None:
    result = answer(scale_rl, "--at", 2542, "--at", 25_420)
    inside, beyond = result["forecasts"]
    # Half way at C_mid; at 10 C_mid 1 / (1 + 10^-1.92) = .98812 of the rise of .26.
    assert inside["R"] == pytest.approx(0.35 + 0.13, abs=0.003)
    assert beyond["R"] == pytest.approx(0.35 + 0.26 * 0.98812, abs=0.01)
    assert (inside["extrapolated"], beyond["extrapolated"]) == (False, True)
    for one in (inside, beyond):
        assert one["R_interval"][0] <= one["R"] <= one["R_interval"][1]
    assert np.ptp(inside["R_interval"]) < np.ptp(beyond["R_interval"])
    assert "beyond the data" in invoke(scale_rl, "--at", 25_420)


def test_compare_refits_at_a_common_asymptote(scale_rl: Path, batch_512: Path) -> None:
    result = answer("--compare", scale_rl, batch_512)
    first, second = result["runs_fitted"]
    assert min(first["A"], second["A"]) <= result["common_A"] <= max(first["A"], second["A"])
    assert first["at_common_A"]["A"] == second["at_common_A"]["A"] == result["common_A"]
    assert first["at_common_A"]["B"] > second["at_common_A"]["B"]
    # One parameter less to be unsure of.
    assert np.ptp(first["at_common_A"]["B_interval"]) < np.ptp(first["B_interval"])
    assert any("compare B and C_mid" in text for text in result["warnings"])
    shown = invoke("--compare", scale_rl, batch_512)
    assert "at A = 0.6" in shown
    assert "batch_512" in shown


def test_help_stays_light() -> None:
    program = "import sys, launch.cli; sys.exit(bool({'scipy', 'matplotlib', 'numpy', 'torch'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", program], cwd=ROOT, timeout=240).returncode == 0

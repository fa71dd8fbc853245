"""Goals, verdicts and the machine's description of the GPU checks."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path

import pytest

from tests.gpu import machine
from tests.gpu.__main__ import ORDER
from tests.gpu.goals import Figure, Goal, Verdict, ratios
from tests.gpu.harness import load_check

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize(
    ("bounds", "value", "verdict"),
    [
        (dict(at_most=1.5), 1.5, "met"),
        (dict(at_most=1.5), 1.51, "missed"),
        (dict(at_least=0.45), 0.45, "met"),
        (dict(at_least=0.45), 0.44, "missed"),
        (dict(below=1e-3), 1e-3, "missed"),
        (dict(below=1e-3), 9e-4, "met"),
        (dict(at_least=0.02, at_most=0.04), 0.03, "met"),
        (dict(at_least=0.02, at_most=0.04), 0.01, "missed"),
        (dict(at_most=0.0), 0.0, "met"),
        (dict(at_most=1.5), math.nan, "missed"),
        (dict(at_least=1.5), math.nan, "missed"),
        (dict(below=1.5), math.nan, "missed"),
        (dict(at_most=1.5), math.inf, "missed"),
        ({}, 3.0, "shown"),
        ({}, [1.0, 2.0], "shown"),
        ({}, "9.0", "shown"),
        (dict(at_most=1.5), "no kernel", "not measured"),
    ],
)
def test_a_bound_is_judged(bounds: dict[str, float], value: Figure, verdict: Verdict) -> None:
    assert Goal(figure="f", what="", **bounds).judge({"f": value})[0] == verdict


def test_a_reason_stands_where_a_figure_is_missing() -> None:
    goal = Goal(figure="f", what="", at_most=1.0)
    assert goal.judge({"f": "no kernel"}) == ("not measured", "no kernel")
    assert goal.judge({"other": 1.0}) == ("not measured", "the check did not get that far")


def test_wanted_reads_like_the_bounds() -> None:
    assert Goal(figure="f", what="", at_least=0.02, at_most=0.04).wanted == "≤ 0.04, ≥ 0.02"
    assert Goal(figure="f", what="", below=1e-3).wanted == "< 0.001"
    assert Goal(figure="f", what="").wanted == ""


def test_ratios_leave_out_what_cannot_be_divided() -> None:
    figures: dict[str, Figure] = {"a": 3.0, "b": 2.0, "zero": 0.0, "text": "why", "list": [1.0]}
    wanted = {name: ("a", name) for name in ("b", "zero", "text", "list", "missing")}
    assert ratios(figures, wanted) == {"b": 1.5}


@pytest.mark.parametrize("name", ORDER)
def test_a_check_declares_itself(name: str) -> None:
    check = load_check(f"tests.gpu.checks.{name}")
    figures = [goal.figure for goal in check.GOALS]
    assert name == check.NAME
    assert len(set(figures)) == len(figures)
    assert len(set(check.PARTS)) == len(check.PARTS) > 0
    assert check.DEADLINE_S <= 480
    assert check.derive({}) == {}
    assert {before.partition(".")[0] for before in check.AFTER} <= set(ORDER[: ORDER.index(name)])
    assert check.__doc__


def test_what_a_check_builds_on_exists() -> None:
    for name in ORDER:
        for before in load_check(f"tests.gpu.checks.{name}").AFTER:
            check, _, part = before.partition(".")
            assert not part or part in load_check(f"tests.gpu.checks.{check}").PARTS


def test_goals_are_read_without_the_stack() -> None:
    checks = ", ".join(f"tests.gpu.checks.{name}" for name in ORDER)
    code = f"import sys, tests.gpu.__main__, {checks}; print(*{{name.split('.')[0] for name in sys.modules}})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert set(done.stdout.split()) & {"torch", "megatron", "sglang", "transformers", "triton"} == set()


def test_nvidia_smi_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = tmp_path / "nvidia-smi"
    fake.write_text("#!/bin/sh\necho 'NVIDIA H100 80GB HBM3, 580.1, 81559 MiB, 1980 MHz, 700.00 W'\n")
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    found = machine.describe_machine()
    assert (found["device"], found["driver_version"], found["gpus"]) == ("NVIDIA H100 80GB HBM3", "580.1", 1)
    fake.write_text("#!/bin/sh\nexit 9\n")
    assert machine.describe_machine()["device"] == "CPU"


def test_the_engines_interpreter_is_asked_for_its_versions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = tmp_path / "rollout-python"
    fake.write_text("#!/bin/sh\necho 0.5.17 2.11.0 5.12.1\n")
    fake.chmod(0o755)
    monkeypatch.setenv("EVENKEEL_ROLLOUT_PYTHON", str(fake))
    versions = machine.describe_versions()
    assert versions["sglang"] == "0.5.17"
    assert versions["engine transformers"] == "5.12.1"
    monkeypatch.setenv("EVENKEEL_ROLLOUT_PYTHON", str(tmp_path / "nowhere"))
    assert machine.describe_versions()["sglang"] == "missing"


def test_sources_are_known_without_git() -> None:
    assert "sources " in machine.describe_sources()

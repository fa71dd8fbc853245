"""Launchers plan with the sizes of a model that is on the cluster alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from launch.plan.hosts import sizes_folder
from pipeline.config.loader import SHIPPED

DENSE = Path("qwen3_32b")
ELSEWHERE = Path("/models-of-the-cluster/Qwen3-32B")


def test_a_shipped_recipe_brings_its_sizes_and_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert sizes_folder(DENSE, ELSEWHERE, None) == SHIPPED / "models/qwen3-32b"
    note = capsys.readouterr().err
    assert note.startswith(f"note: model.path {ELSEWHERE} is not on this machine; planned with the sizes of")
    assert note.count("\n") == 1


def test_a_model_that_is_here_is_read_and_so_is_a_relative_path(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert sizes_folder(DENSE, tmp_path, None) is None
    assert sizes_folder(DENSE, Path("models/qwen3-32b"), None) is None
    assert capsys.readouterr().err == ""

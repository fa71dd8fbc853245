"""What commands take that go by a recipe or by a run."""

from __future__ import annotations

from pathlib import Path

import pytest

from launch.terminal import check_recipe_or_run
from pipeline.errors import RecipeError


def test_a_folder_of_its_name_does_not_hide_a_shipped_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("demo", "mine"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path)
    check_recipe_or_run(Path("demo"))
    with pytest.raises(RecipeError, match="mine: no recipe and no run directory of that name"):
        check_recipe_or_run(Path("mine"))

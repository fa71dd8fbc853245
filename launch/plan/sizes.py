"""Whose sizes a launcher plans with, where the model is on the cluster and not on the machine that writes the files."""

from __future__ import annotations

import sys
from pathlib import Path

from pipeline.config.loader import SHIPPED, find_recipe, load_recipe
from pipeline.errors import ModelError


def sizes_folder(recipe_path: Path, model_path: Path, given: Path | None) -> Path | None:
    """The folder with the config.json to plan with: `given` (--model-config), or that of a shipped recipe when an
    absolute model.path is not on this machine, which is said on stderr. None: wherever `model_path` leads.

    Raises ModelError when there is none.
    """
    if given is not None:
        if not (given / "config.json").is_file():
            raise ModelError(
                f"--model-config {given} holds no config.json; give a folder that has one (no weights are needed)"
            )
        return given
    if not model_path.is_absolute() or (model_path / "config.json").is_file():
        return None
    path = find_recipe(recipe_path)
    shipped = _shipped_sizes(path)
    if shipped is None:
        raise ModelError(
            f"model.path {model_path} is not on this machine, and {path} names no sizes; give a folder with the "
            "model's config.json: --model-config FOLDER (no weights are needed)"
        )
    print(
        f"note: model.path {model_path} is not on this machine; planned with the sizes of recipe {path.stem}, "
        f"{shipped / 'config.json'}; --model-config FOLDER gives others",
        file=sys.stderr,
    )
    return shipped


def _shipped_sizes(path: Path) -> Path | None:
    """The folder of sizes that a shipped recipe names; None for any other recipe, or when it names none."""
    if path.resolve().parent != SHIPPED.resolve():
        return None
    folder = SHIPPED / load_recipe(path).model.path
    return folder if (folder / "config.json").is_file() else None

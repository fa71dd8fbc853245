"""Several runs at once: those of a folder, and what tells some of them apart. Reads files only; needs no torch."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pipeline.analysis.run_log import RunLog
from pipeline.analysis.summary import summarize, summary
from pipeline.data.run_directory import RunDirectory
from pipeline.errors import EvenKeelError, RecipeError, StoreError
from pipeline.resume import reward_code

MISSING = "–"
"""What a recipe says of a key that its choice of an algorithm or a task does not have."""


def list_runs(folder: Path) -> list[dict[str, Any]]:
    """The summary of each run directory below `folder`, by name, with its `path`; `error` alone where it is unreadable.

    Raises StoreError when `folder` is no folder.
    """
    if not folder.is_dir():
        raise StoreError(f"{folder} is no folder; give the one that holds runs, for example runs")
    found = sorted(path for path in folder.iterdir() if os.path.lexists(path / "recipe.yaml"))
    return [dict(path=str(path)) | _summary_or_error(path) for path in found]


def _summary_or_error(path: Path) -> dict[str, Any]:
    try:
        return summary(path)
    except EvenKeelError as error:
        return dict(error=str(error))


def compare_runs(paths: Sequence[Path]) -> dict[str, Any]:
    """Summaries of `paths` in their order, and each recipe key in which two of them differ, with one value a run.

    Raises RecipeError (fewer than two runs, or one of them twice) and StoreError (no run directory).
    """
    if len(paths) < 2:
        raise RecipeError(f"{len(paths)} run was given, expected at least two; give more, or use `evenkeel runs show`")
    if len({path.resolve() for path in paths}) < len(paths):
        raise RecipeError("a run was given twice; give each run once")
    logs = [RunLog.read(path) for path in paths]
    recipes = [_flat(run_log.recipe.model_dump(mode="json")) for run_log in logs]
    for path, recipe in zip(paths, recipes, strict=True):
        recipe["code of the reward"] = reward_code(RunDirectory(path)) or MISSING
    keys = list(dict.fromkeys(key for recipe in recipes for key in recipe))
    values = {key: [recipe.get(key, MISSING) for recipe in recipes] for key in keys}
    return dict(
        runs=[dict(path=str(path)) | summarize(run_log) for path, run_log in zip(paths, logs, strict=True)],
        recipe={key: told for key, told in values.items() if any(value != told[0] for value in told)},
    )


def _flat(section: Mapping[str, Any], above: str = "") -> dict[str, Any]:
    """`section.key` and its value, for every key that holds no mapping, or an empty one."""
    flat: dict[str, Any] = {}
    for key, value in section.items():
        if isinstance(value, Mapping) and value:
            flat |= _flat(value, f"{above}{key}.")
        else:
            flat[f"{above}{key}"] = value
    return flat

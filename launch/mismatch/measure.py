"""What `evenkeel mismatch` does: measure, say what it means, write it down."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from launch.mismatch.fresh import measure_recipe
from launch.mismatch.recorded import measure_run
from pipeline.analysis.mismatch.findings import findings, verdict
from pipeline.analysis.mismatch.measured import Measured
from pipeline.analysis.mismatch.page import write_page
from pipeline.config.loader import load_recipe
from pipeline.data.files import write_atomically
from pipeline.errors import RecipeError


def measure(
    source: Path,
    overrides: Sequence[str],
    *,
    out: Path | None,
    num_prompts: int | None,
    now: Path | None,
    batch: int | None,
    locate: bool,
) -> dict[str, Any]:
    """Attribute fresh rollouts of a recipe, or a recorded batch of a run, into the folder `out`: mismatch.json,
    mismatch.html and mismatch.png. Raises FatalError."""
    if (source / "recipe.yaml").is_file():
        _refuse({"--prompts": num_prompts, "--now": now, "--set": list(overrides) or None}, "a recipe")
        measured = measure_run(source, batch=batch, locate=locate)
        name, root = source.name, source.parent
    else:
        _refuse({"--batch": batch}, "a run directory")
        recipe = load_recipe(source, overrides)
        count = num_prompts or recipe.rollout.prompts_per_batch
        measured = measure_recipe(recipe, num_prompts=count, now=now, locate=locate)
        name, root = recipe.run.name, recipe.run.root
    result = judged(measured)
    folder = out or root / f"{name}-mismatch"
    page, picture = write_page(result, folder)
    write_atomically(folder / "mismatch.json", json.dumps(result) + "\n")
    return {**result, "page": str(page), "picture": str(picture)}


def _refuse(options: Mapping[str, Any], belongs_to: str) -> None:
    for name, value in options.items():
        if value is not None:
            raise RecipeError(f"{name} belongs to {belongs_to}; leave it out, or give {belongs_to}")


def judged(measured: Measured) -> dict[str, Any]:
    """The attribution with its findings and its verdict."""
    result = measured.result()
    found = findings(result)
    return {
        **result,
        "cause": asdict(found[0]) if found else None,
        "findings": [asdict(one) for one in found],
        "verdict": verdict(result, found),
    }

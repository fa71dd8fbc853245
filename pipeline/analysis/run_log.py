"""A run as its logs tell it: steps, evaluations and what went wrong. Reads files only; needs no torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.config.recipe import Recipe
from pipeline.data.event_log import read_events, read_metrics
from pipeline.data.frozen.recipes import RecipeInForce, all_recipes, recipe_of_step
from pipeline.data.run_directory import RunDirectory
from pipeline.errors import StoreError


@dataclass(frozen=True, kw_only=True)
class RunLog:
    """`metrics` holds one mapping a step, sorted; `events` are in the order in which they were written."""

    run_dir: Path
    recipes: list[RecipeInForce]
    """Every one that the run went by, in order: the steps of a fork, or of a run that was changed, went by several."""
    metrics: list[dict[str, Any]]
    events: list[dict[str, Any]]

    @staticmethod
    def read(run_dir: Path) -> RunLog:
        """Read a run, finished or not. Raises StoreError when `run_dir` is not a run directory."""
        if not run_dir.is_dir():
            what = "is no folder" if run_dir.exists() else "does not exist"
            raise StoreError(f"{run_dir} {what}; give the folder of a run, for example runs/NAME")
        recipes = all_recipes(run_dir)
        return RunLog(run_dir=run_dir, recipes=recipes, metrics=read_metrics(run_dir), events=read_events(run_dir))

    @property
    def recipe(self) -> Recipe:
        """The one that the run goes by now."""
        return self.recipes[-1].recipe

    def recipe_of(self, step: int) -> Recipe:
        """The one that a step was trained by, or will be."""
        return recipe_of_step(self.recipes, step)

    def series(self, key: str) -> tuple[list[int], list[float]]:
        """Steps and values of one metric, without the steps in which it is missing or not finite; `a/b` is b in a."""
        points = [(int(line["step"]), number(_within(line, key), key.rpartition("/")[2])) for line in self.metrics]
        known = [(step, value) for step, value in points if value is not None]
        return [step for step, _ in known], [value for _, value in known]

    def last(self, key: str) -> float | None:
        """The newest finite value of one metric."""
        values = self.series(key)[1]
        return values[-1] if values else None

    def of_kind(self, *kinds: str) -> list[dict[str, Any]]:
        """Events of the given kinds."""
        return [event for event in self.events if event["kind"] in kinds]

    @property
    def evaluations(self) -> list[dict[str, Any]]:
        """`evaluated` events by version; when a version was evaluated twice, the later one."""
        by_version = {int(event["version"]): event for event in self.of_kind("evaluated")}
        return [by_version[version] for version in sorted(by_version)]

    @property
    def skipped(self) -> list[int]:
        """Steps that were skipped because their batch was lost by damage, ascending."""
        return RunDirectory(self.run_dir).skipped_steps()

    @property
    def num_steps(self) -> int:
        """Steps trained so far, or skipped."""
        return 1 + max([*(int(line["step"]) for line in self.metrics[-1:]), *self.skipped[-1:]], default=-1)

    @property
    def is_complete(self) -> bool:
        """Whether every step of the recipe was trained."""
        return self.num_steps >= self.recipe.run.steps

    @property
    def wall_s(self) -> float:
        """Seconds from the first line of the logs to the last; pauses between two sessions of the run count."""
        times = [float(line["time"]) for line in (*self.events, *self.metrics)]
        return max(times) - min(times) if times else 0.0


def _within(line: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """The mapping that holds the last part of a key; an empty one where there is none."""
    for part in key.split("/")[:-1]:
        line = line[part] if isinstance(line.get(part), Mapping) else {}
    return line


def number(line: Mapping[str, Any], key: str) -> float | None:
    """A finite number, or None."""
    value = line.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value)

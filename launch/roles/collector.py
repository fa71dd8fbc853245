"""The collector: `evenkeel role collector RUN`. It waits for the run and for an engine, then asks for every batch."""

from __future__ import annotations

import asyncio
from pathlib import Path

from launch.build.rewards import check_reward
from launch.roles.base import wait_for_data, wait_for_recipe
from launch.run.collect import collect
from launch.run.waiting import Stop, announced, wait_for_engines, wait_for_policy
from pipeline.config.recipe import Recipe
from pipeline.data.epochs import Epoch, claim
from pipeline.data.run_directory import RunDirectory
from pipeline.data.run_recipes import newest_recipe_file
from pipeline.tasks import build_task


def run_collector(run: RunDirectory, stop: Stop, recipe: Path | None = None) -> int:
    """The exit status. `recipe` is the one that the learner is given, if it is known."""
    frozen = wait_for_recipe(run, stop) if recipe is None else wait_for_data(run, stop, recipe)
    epoch = claim(run.path, "collector", recipe=frozen.path.name)
    if newest_recipe_file(run.path) != frozen.path:  # it was changed between the two
        return run_collector(run, stop, recipe)
    with epoch.superseded_said():
        _collect(run.under(epoch), frozen.recipe, epoch, stop)
    return 0


def _collect(run: RunDirectory, recipe: Recipe, epoch: Epoch, stop: Stop) -> None:
    if run.is_finished():
        return
    if not announced(run, recipe):
        check_reward(run, recipe, build_task(recipe.task, recipe.run.seed))
    wait_for_policy(run, recipe, stop)
    wait_for_engines(run, recipe, stop, 1)
    asyncio.run(collect(run, epoch, stop.check))
    run.set_finished("collector")

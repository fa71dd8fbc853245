"""Run the collector, `evenkeel role collector RUN`: wait for the run and for an engine, then collect every batch."""

from __future__ import annotations

import asyncio
import math
import signal
from collections.abc import Callable
from pathlib import Path

from launch.build.components import (
    build_contract,
    build_interruption,
    build_limits,
    build_prompts,
    build_sampling,
    build_solved_prompt_rule,
    build_tokenizer,
)
from launch.build.engines import build_fleet
from launch.build.episodes import build_episodes
from launch.build.rewards import build_group_filter, build_verifiers, check_reward
from launch.build.teacher import teacher_of
from launch.roles.lifecycle import wait_for_data, wait_for_recipe
from launch.run.environment import environment
from launch.run.metrics import metrics_of, observers_of
from launch.run.waiting import Stop, announced, wait_for_engines, wait_for_policy
from pipeline.background import spare_collections
from pipeline.config.recipe import Recipe
from pipeline.control.files import ControlFiles
from pipeline.data.epochs import Epoch, claim
from pipeline.data.event_log import EventLog
from pipeline.data.files import remove_leftovers
from pipeline.data.run_directory import RunDirectory
from pipeline.data.run_recipes import newest_recipe_file, recipe_in_force
from pipeline.data.store import BatchStore
from pipeline.errors import StoppedError
from pipeline.rollout.collector import Collector, CollectorSettings
from pipeline.spans import recorded
from pipeline.tasks import build_task
from pipeline.tasks.tokenizer import Tokenizer


def run_collector(run: RunDirectory, stop: Stop, recipe: Path | None = None) -> int:
    """Run the collector; return the exit status. `recipe` is the learner's, if it is known."""
    frozen = wait_for_recipe(run, stop) if recipe is None else wait_for_data(run, stop, recipe)
    epoch = claim(run.path, "collector", recipe=frozen.path.name)
    if newest_recipe_file(run.path) != frozen.path:  # the recipe has changed meanwhile
        return run_collector(run, stop, recipe)
    with epoch.as_superseded():
        run, in_force = run.under(epoch), frozen.recipe
        if run.is_finished():
            return 0
        if not announced(run, in_force):
            check_reward(run, in_force, build_task(in_force.task, in_force.run.seed))
        wait_for_policy(run, in_force, stop)
        wait_for_engines(run, in_force, stop, 1)
        asyncio.run(collect(run, epoch, stop.check))
        run.set_finished("collector")
    return 0


def settings(run: RunDirectory, recipe: Recipe, tokenizer: Tokenizer) -> CollectorSettings:
    rollout, evaluation = recipe.rollout, recipe.evaluation
    return CollectorSettings(
        prompts_per_batch=rollout.prompts_per_batch,
        group_size=rollout.group_size,
        sampling=build_sampling(recipe),
        concurrent_prompts=rollout.concurrent_prompts,
        engines=len(rollout.urls) or rollout.engines,
        max_prompt_tokens=rollout.context_tokens - rollout.max_new_tokens,
        evaluate_every=evaluation.every,
        evaluation_prompts=evaluation.prompts,
        evaluation_samples=evaluation.samples,
        evaluation_sampling=build_sampling(recipe, evaluation.temperature),
        wait_deadline_s=recipe.run.wait_deadline_s,
        recipe_sha256=recipe_in_force(run.path).sha256,
        interruption=build_interruption(recipe, tokenizer),
        max_refills=recipe.prompts.max_refills if recipe.prompts.refill or recipe.prompts.group_filter else 0,
        keeps_equal=not recipe.prompts.refill,
        window=dict(fifo=0.0, window=rollout.window * rollout.prompts_per_batch, ready=math.inf)[rollout.composition],
        solved_rule=build_solved_prompt_rule(recipe),
        solved_at=recipe.reward.solved_at,
        special_tokens=recipe.reward.special_tokens,
    )


def lags_of(run: RunDirectory, recipe: Recipe) -> Callable[[int], tuple[tuple[int, int], ...]] | None:
    """Return version → lags decided before it is published, by the record of its step; None without such lags."""
    if recipe.controller is None or recipe.schedule.kind != "async":
        return None
    files = ControlFiles(run.control, run.fence)
    return lambda version: files.wait(version - 1).lags if version else ()


async def collect(run: RunDirectory, epoch: Epoch, check_stop: Callable[[], None]) -> None:
    """Collect every batch that the run lacks. Raises StoppedError at SIGTERM and Ctrl-C; the next start asks again what
    was in flight. `check_stop` raises it for an earlier signal."""
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    check_stop()
    recipe = run.recipe()
    tokenizer = build_tokenizer(recipe)
    prompts = build_prompts(recipe, tokenizer)
    store = BatchStore(run.batches, run.fence, limits=build_limits(recipe))
    for folder in (run.batches, run.evaluations):
        remove_leftovers(folder, run.fence)
    metrics = metrics_of("collector", run.path)
    event_log = EventLog(run.path, epoch.name, observers_of(metrics))
    event_log.event("environment", role="collector", **environment())
    fleet = build_fleet(run, recipe, epoch, event_log.event)
    try:
        with (
            recorded(run.path, epoch.name),
            build_verifiers(run, recipe, prompts.task, event_log) as verifiers,
        ):
            async with (
                teacher_of(run, recipe, prompts, event_log) as teacher,
                build_episodes(run, recipe, tokenizer, event_log) as episodes,
            ):
                collector = Collector(
                    run=run,
                    store=store,
                    schedule=recipe.build_schedule(),
                    engines=fleet,
                    prompts=prompts,
                    tokenizer=tokenizer,
                    verifiers=verifiers,
                    teacher=teacher,
                    episodes=episodes,
                    group_filter=build_group_filter(recipe),
                    contract=build_contract(recipe, tokenizer),
                    event_log=event_log,
                    settings=settings(run, recipe, tokenizer),
                    decided_lags=lags_of(run, recipe),
                    stop=stop,
                )
                if metrics is not None:
                    metrics.fleet, metrics.slots = fleet.state, collector.slots
                published = run.published_version
                async with fleet.monitored(lambda: (published(), run.policy_directory(published())), collector.slots):
                    spare_collections()
                    finished = await collector.collect()
    finally:
        await fleet.close()
    if not finished:
        raise StoppedError("asked to end before the run was finished; started again, it goes on")

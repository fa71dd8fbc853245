"""The collector loop of a run, built from its recipe; `evenkeel role collector` runs it."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from pathlib import Path

from launch.build.api_key import read_api_key
from launch.build.components import (
    build_contract,
    build_interruption,
    build_limits,
    build_prompts,
    build_sampling,
    build_solved_prompt_rule,
    build_tokenizer,
)
from launch.build.rewards import build_group_filter, build_verifiers
from launch.build.teacher import teacher_of
from launch.run.environment import environment
from launch.run.metrics import metrics_of, observers_of
from pipeline.beside_loop import spare_collections
from pipeline.config.recipe import Recipe
from pipeline.control.files import ControlFiles
from pipeline.data.epochs import Epoch
from pipeline.data.event_log import EventLog
from pipeline.data.files import remove_leftovers
from pipeline.data.run_directory import RunDirectory
from pipeline.data.run_recipes import recipe_in_force
from pipeline.data.store import BatchStore
from pipeline.errors import StoppedError
from pipeline.rollout.collector import Collector, CollectorSettings
from pipeline.spans import recorded
from pipeline.tasks.tokenizer import Tokenizer
from rollout_sglang.engine_pool import OnChange
from rollout_sglang.fleet import Fleet
from rollout_sglang.target import FleetSettings
from rollout_sglang.weights.update_lease import Updates


def build_fleet(run: RunDirectory, recipe: Recipe, epoch: Epoch | None, on_change: OnChange | None = None) -> Fleet:
    """The run's engines, whichever there are at a time. `epoch` is that of the role that gives weights."""
    return Fleet(run.membership(recipe.rollout.urls), **fleet_settings(run, recipe, epoch, on_change))


def fleet_settings(
    run: RunDirectory, recipe: Recipe, epoch: Epoch | None, on_change: OnChange | None = None
) -> FleetSettings:
    """What a Fleet needs to know beside its engines."""
    return FleetSettings(
        updates=Updates(run.updates, epoch),
        on_change=on_change,
        api_key=read_api_key(),
        request_deadline_s=recipe.rollout.request_deadline_s,
        load_deadline_s=recipe.weights.publish_deadline_s,
        keeps_kv=recipe.weights.kv_cache == "keep",
    )


def settings(run: RunDirectory, recipe: Recipe, tokenizer: Tokenizer) -> CollectorSettings:
    """The numbers of the recipe that the collector reads."""
    rollout, evaluation = recipe.rollout, recipe.evaluation
    return CollectorSettings(
        prompts_per_batch=rollout.prompts_per_batch,
        group_size=rollout.group_size,
        sampling=build_sampling(recipe),
        concurrent_prompts=rollout.concurrent_prompts,
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
        solved_rule=build_solved_prompt_rule(recipe),
        solved_at=recipe.reward.solved_at,
        special_tokens=recipe.reward.special_tokens,
    )


def _published(run: RunDirectory) -> tuple[int, Path]:
    version = run.published_version()
    return version, run.policy_directory(version)


def lags_of(run: RunDirectory, recipe: Recipe) -> Callable[[int], tuple[tuple[int, int], ...]] | None:
    """Published version → the lags that were decided until then. The record of a step is there before the version after
    it is published; None where there are no records, or where they decide no lag."""
    if recipe.controller is None or recipe.schedule.kind != "async":
        return None
    files = ControlFiles(run.control, run.fence)
    return lambda version: files.wait(version - 1).lags if version else ()


async def collect(run: RunDirectory, epoch: Epoch, check_stop: Callable[[], None]) -> None:
    """Collect every batch that the run lacks. Raises StoppedError at SIGTERM and at Ctrl-C: what was in flight is asked
    again by the next start. `check_stop` raises it for a signal that came before."""
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    check_stop()
    recipe = run.recipe()
    tokenizer = build_tokenizer(recipe)
    prompts = build_prompts(recipe, tokenizer)
    store = BatchStore(run.batches, run.fence, limits=build_limits(recipe))
    store.remove_partial()
    remove_leftovers(run.evaluations, run.fence)
    metrics = metrics_of("collector", run.path)
    event_log = EventLog(run.path, epoch.name, observers_of(metrics))
    event_log.event("environment", role="collector", **environment())
    fleet = build_fleet(run, recipe, epoch, event_log.event)
    try:
        with (
            recorded(run.path, epoch.name),
            build_verifiers(run, recipe, prompts.task, event_log) as verifiers,
        ):
            async with teacher_of(run, recipe, prompts, event_log) as teacher:
                collector = Collector(
                    run=run,
                    store=store,
                    schedule=recipe.build_schedule(),
                    engines=fleet,
                    prompts=prompts,
                    tokenizer=tokenizer,
                    verifiers=verifiers,
                    teacher=teacher,
                    group_filter=build_group_filter(recipe),
                    contract=build_contract(recipe, tokenizer),
                    event_log=event_log,
                    settings=settings(run, recipe, tokenizer),
                    decided_lags=lags_of(run, recipe),
                    stop=stop,
                )
                if metrics is not None:
                    metrics.watch_fleet(fleet.state, lambda: collector.num_waiting)
                async with fleet.monitored(lambda: _published(run)):
                    spare_collections()
                    finished = await collector.collect()
    finally:
        await fleet.close()
    if not finished:
        raise StoppedError("asked to end before the run was finished; started again, it goes on")

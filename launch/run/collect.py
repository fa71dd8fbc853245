"""The collector program: `python -m launch.run.collect RUN`. Started by the supervisor, JobSet or Slurm alike."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

from launch.build.components import (
    build_contract,
    build_interruption,
    build_prompts,
    build_sampling,
    build_solved_prompt_rule,
    build_tokenizer,
)
from launch.run.processes import run_child
from pipeline.child_process import die_with_parent
from pipeline.config.recipe import Recipe
from pipeline.data.epochs import claim
from pipeline.data.event_log import EventLog
from pipeline.data.run_directory import RunDirectory
from pipeline.data.store import BatchStore
from pipeline.rewards.pool import Verifiers
from pipeline.rollout.collector import Collector, CollectorSettings
from pipeline.tasks.tokenizer import Tokenizer
from rollout_sglang.fleet import Fleet, FleetSettings
from rollout_sglang.server.launch_server import API_KEY_VARIABLE


def build_fleet(run: RunDirectory, recipe: Recipe) -> Fleet:
    """The run's engines, as they are announced in engines.json."""
    urls, _ = run.engines()
    return Fleet(urls, **fleet_settings(run, recipe))


def fleet_settings(run: RunDirectory, recipe: Recipe) -> FleetSettings:
    """What a Fleet needs to know beside its engines."""
    _, router = run.engines()
    return FleetSettings(
        router_url=router,
        api_key=os.environ.get(API_KEY_VARIABLE),
        lock_path=run.weight_update_lock,
        request_deadline_s=recipe.rollout.request_deadline_s,
        load_deadline_s=recipe.weights.publish_deadline_s,
    )


def settings(recipe: Recipe, tokenizer: Tokenizer) -> CollectorSettings:
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
        recipe_sha256=recipe.sha256(),
        interruption=build_interruption(recipe, tokenizer),
        max_refills=recipe.prompts.max_refills if recipe.prompts.refill else 0,
        solved_rule=build_solved_prompt_rule(recipe),
    )


async def collect(run: RunDirectory) -> None:
    """Collect every batch that the run lacks."""
    recipe = run.recipe()
    epoch = claim(run.path, "collector")
    run = run.under(epoch)
    tokenizer = build_tokenizer(recipe)
    prompts = build_prompts(recipe, tokenizer)
    store = BatchStore(run.batches, run.fence)
    store.remove_partial()
    fleet = build_fleet(run, recipe)
    try:
        with Verifiers(prompts.task.reward, recipe.reward.workers, recipe.reward.deadline_s) as verifiers:
            await Collector(
                run=run,
                store=store,
                schedule=recipe.build_schedule(),
                engines=fleet,
                prompts=prompts,
                tokenizer=tokenizer,
                verifiers=verifiers,
                contract=build_contract(recipe, tokenizer),
                event_log=EventLog(run.path, epoch.name),
                settings=settings(recipe, tokenizer),
            ).collect()
    finally:
        await fleet.close()


if __name__ == "__main__":
    die_with_parent()
    directory = RunDirectory(Path(sys.argv[1]))
    run_child(directory, "collector", lambda: asyncio.run(collect(directory)))

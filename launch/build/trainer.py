"""The learner's loop from a recipe: one place for training, replays, tools and tests."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from launch.build.algorithm import build_scoring
from megatron_bridge.step.learning_rate import LearningRates, RateSpan
from pipeline.advantages.compute import AdvantageComputer
from pipeline.config.recipe import Recipe
from pipeline.control.loop import StepController
from pipeline.data.batch import LogprobContract
from pipeline.data.event_log import EventLog
from pipeline.data.run_directory import RunDirectory
from pipeline.data.run_recipes import all_recipes
from pipeline.data.store import BatchStore
from pipeline.patience import noted_in
from pipeline.ports.weight_update import WeightChannel
from pipeline.trainer.batch_source import BatchSource, waiting_for_batches
from pipeline.trainer.checkpoints import Checkpoints
from pipeline.trainer.loop import Trainer
from pipeline.trainer.mini_batches import dealt_together
from pipeline.trainer.old_logprobs import OldLogprobs
from pipeline.trainer.reference import require_same_reference
from pipeline.trainer.step_size import StepSize

if TYPE_CHECKING:
    from megatron_bridge.learner import MegatronLearner
    from megatron_bridge.step.kept_versions import KeptVersions
    from megatron_bridge.step.reference import ReferencePolicy


def build_trainer(
    run: RunDirectory,
    recipe: Recipe,
    learner: MegatronLearner,
    *,
    store: BatchStore,
    contract: LogprobContract,
    checkpoints: Checkpoints,
    event_log: EventLog,
    channel: WeightChannel | None = None,
    checkpoint_every: int | None = None,
    controller: StepController | None = None,
    stop_requested: Callable[[], bool] | None = None,
) -> Trainer:
    """A Trainer over the batches of `store`. Collective. `checkpoint_every` is the recipe's by default."""
    advantages, scoring = AdvantageComputer.of(recipe), build_scoring(recipe)
    optimizer, updates = recipe.learner.optimizer, recipe.learner.updates_per_batch
    stops: dict[str, Any] = {} if stop_requested is None else dict(stop_requested=stop_requested)
    shared: dict[str, Any] = dict(
        run=run,
        batches=BatchSource(
            run=run,
            store=store,
            learner=learner,
            contract=contract,
            wait_deadline_s=recipe.run.wait_deadline_s,
            together=partial(dealt_together, advantages, updates),
            patience=waiting_for_batches(noted_in(event_log.event)),
            **stops,
        ),
        learner=learner,
        schedule=recipe.build_schedule(),
        updates_per_batch=updates,
    )
    step_size = StepSize(lr_by_lag=optimizer.lr_by_lag, updates_per_batch=updates, controller=controller)
    return Trainer(
        **shared,
        old_logprobs=OldLogprobs(**shared, versions=build_versions(recipe, learner)) if scoring.reads_old else None,
        advantage_computer=advantages,
        scoring=scoring,
        step_size=step_size,
        channel=channel,
        checkpoints=checkpoints,
        checkpoint_every=checkpoint_every or recipe.checkpoint.every,
        event_log=event_log,
        reference=build_reference(run, recipe, learner),
        controller=controller,
    )


def build_versions(recipe: Recipe, learner: MegatronLearner) -> KeptVersions | None:
    """The policy's older versions, where log-probabilities at the one that sampled are read and it may be an older one
    than the learner's: in sync there is no such one, and a stage is scored at its beginning."""
    if not recipe.num_kept_versions:
        return None
    from megatron_bridge.step.kept_versions import KeptVersions  # which brings Megatron-Core

    return KeptVersions(learner, lag=recipe.num_kept_versions)


def build_reference(run: RunDirectory, recipe: Recipe, learner: MegatronLearner) -> ReferencePolicy | None:
    """What the loss holds the policy near. Collective."""
    if recipe.reference is None:
        return None
    from megatron_bridge.step.reference import ReferencePolicy  # which brings Megatron-Core

    folder = recipe.reference.path or recipe.model.path
    require_same_reference(run, learner, folder)
    return ReferencePolicy(learner, folder)


def build_rates(run: RunDirectory) -> LearningRates:
    """The learning rate of every step of a run, as the recipes say that it went by."""
    return LearningRates(
        tuple(
            RateSpan(
                one.first_step,
                one.recipe.learner.optimizer,
                one.recipe.run.steps * one.recipe.learner.updates_per_batch,
                one.recipe.learner.updates_per_batch,
            )
            for one in all_recipes(run.path)
        )
    )

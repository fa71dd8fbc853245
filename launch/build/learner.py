"""Build a learner from a recipe, for training, replays, tools and tests: model, weight channel and training loop."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from launch.build.components import (
    build_objective,
    build_quant_map,
    build_scoring,
    build_tokenizer,
    require_engines_here,
)
from launch.build.control import older_maps
from launch.build.engines import build_fleet, checksums_maker, engine_dtype, fleet_settings
from megatron_bridge.learner import MegatronLearner
from megatron_bridge.model.te_precision import Layers
from megatron_bridge.step.optimizer import LearningRates, RateSpan
from megatron_bridge.weight_sync.delta import DeltaChannel
from megatron_bridge.weight_sync.disk import DiskChannel, ProbeScorer, WeightCheckPlan
from megatron_bridge.weight_sync.ipc_transport import IpcTransport
from megatron_bridge.weight_sync.streaming import MapTransition, StreamedChannel
from megatron_bridge.weight_sync.transport import ProcessGroupTransport
from pipeline.advantages.compute import AdvantageComputer
from pipeline.background import Patience, noted_in
from pipeline.config.recipe import Recipe
from pipeline.config.sections import RolloutPrecision
from pipeline.control.step_controller import StepController
from pipeline.data.batch import LogprobContract
from pipeline.data.epochs import Epoch
from pipeline.data.event_log import EventLog
from pipeline.data.run_directory import RunDirectory
from pipeline.data.run_recipes import all_recipes
from pipeline.data.store import BatchStore
from pipeline.nccl import loaded_release
from pipeline.ports.weights import NUM_ROWS, NUM_ROWS_ON_CPU, ROW_TOKENS, WeightChannel, probe_rows
from pipeline.trainer.batches import WAITS, BatchSource, dealt_together
from pipeline.trainer.checkpoints import Checkpoints
from pipeline.trainer.loop import Trainer
from pipeline.trainer.old_logprobs import OldLogprobs, require_same_reference
from pipeline.trainer.turns import GpuLock, GpuTurns
from rollout_sglang.server.start import has_cuda
from rollout_sglang.weights.weight_update import FleetUpdateSession

if TYPE_CHECKING:
    from megatron_bridge.step.host_weights import KeptVersions, ReferencePolicy

MAX_GAP_NATS: dict[RolloutPrecision, float] = {
    "fp32": 0.01,
    "bf16": 0.15,
    "fp8_tensor": 0.4,
    "fp8_block": 0.4,
    "emulated_fp6": 0.8,
    "emulated_fp4": 2.0,
    "emulated_nvfp4": 2.0,
    "emulated_mxfp4": 2.0,
}
"""Default of weights.probe_max_gap_nats by precision, on random tokens. Where the learner emulates the formats for the
probe, correct weights gave at most .011 nats, over 120 versions of each of eight runs in FP4 and block FP8.

Without emulation (Transformer Engine's layers) the gap includes the formats' error. BF16 costs at most .023. FP8 cost
at most .14 in six tiny models when the bound was set, but up to .33 in trained models since, FP4 up to 1.08. If an
engine with correct weights is refused, raise the bound in the recipe.

FP8 faults, for comparison: all scales 1.25 times too large cost 0.47 to 0.65 in trained models, 0.08 to 0.19 in random
ones; a single scale costs 0.2 to 0.33 and 0.02 to 0.12 (medians). Checksums find smaller faults. Where they are
unknown, lower the bound to 1.5 times the run's probe_kernels_nats, or its probe_gap_nats if it has none."""


def build_learner(recipe: Recipe, layers: Layers | None = None) -> MegatronLearner:
    """Return this rank's part of model and optimizer, with the objective; `layers` as in MegatronLearner.create."""
    return MegatronLearner.create(
        recipe.model.path,
        recipe.learner,
        objective=build_objective(recipe),
        temperature=recipe.learner.temperature or recipe.rollout.temperature,
        seed=recipe.run.seed,
        total_steps=recipe.run.steps * recipe.learner.updates_per_batch,
        fp32_lm_head=recipe.model.fp32_lm_head,
        layers=layers,
        emulate=build_quant_map(recipe) if recipe.learner.fp8_emulation else None,
    )


def build_channel(
    run: RunDirectory,
    recipe: Recipe,
    learner: MegatronLearner,
    epoch: Epoch | None = None,
    probe: ProbeScorer | None = None,
) -> DiskChannel | DeltaChannel | StreamedChannel:
    """Return the channel that brings the learner's weights to the run's engines. Collective. `epoch` is the learner's;
    tools have none. `probe` is shared with another channel of the run."""
    quant, plan, section = build_quant_map(recipe), build_weight_check_plan(recipe), recipe.weights
    probe = probe or ProbeScorer(learner)
    shared: dict[str, Any] = dict(keep=section.keep, deadline_s=section.publish_deadline_s)
    if section.channel == "disk":
        return DiskChannel(learner, build_fleet(run, recipe, epoch), run, quant, plan, probe, **shared)
    if section.channel == "delta":
        shared |= dict(whole_every=section.whole_every)
        return DeltaChannel(learner, build_fleet(run, recipe, epoch), run, quant, plan, probe, **shared)
    membership = run.membership(recipe.rollout.urls)
    if section.channel == "ipc":
        require_engines_here([engine.url for engine in membership.engines()])
    settings = fleet_settings(run, recipe, epoch)
    over_nccl = section.channel == "broadcast" and learner.device.type == "cuda"
    nccl, ranks = loaded_release() if over_nccl else "", recipe.rollout.tensor_parallel
    return StreamedChannel(
        learner,
        FleetUpdateSession(membership, **settings, ranks_per_engine=ranks, nccl=nccl),
        run,
        quant,
        plan,
        probe,
        IpcTransport if section.channel == "ipc" else ProcessGroupTransport,
        num_engines=recipe.rollout.engines,
        bucket_bytes=section.bucket_mib << 20,
        **shared,
    )


def build_transition(run: RunDirectory, recipe: Recipe, learner: MegatronLearner, epoch: Epoch) -> MapTransition:
    """Return the channel of a run whose quant map may change. Collective."""
    probe = ProbeScorer(learner)  # shared, so that it knows the last version of either channel
    usual = build_channel(run, recipe, learner, epoch, probe)
    assert not isinstance(usual, DeltaChannel), "the recipe refuses it with a controller"
    disk: DiskChannel | DeltaChannel | StreamedChannel = usual
    if not isinstance(disk, DiskChannel):
        by_disk = recipe.model_copy(update=dict(weights=recipe.weights.model_copy(update=dict(channel="disk"))))
        disk = build_channel(run, by_disk, learner, epoch, probe)
    assert isinstance(disk, DiskChannel), disk
    return MapTransition(usual, disk, build_quant_map(recipe), older_maps(run, recipe, learner))


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
    gpu_lock: GpuLock | None = None,
) -> Trainer:
    """Return a trainer on the batches of `store`. Collective. `checkpoint_every` is the recipe's by default, `gpu_lock`
    is of a learner that takes turns with engines (rollout.colocated)."""
    from megatron_bridge.step import host_weights

    advantages, scoring = AdvantageComputer.of(recipe), build_scoring(recipe)
    updates = recipe.learner.updates_per_batch
    versions: KeptVersions | None = None
    reference: ReferencePolicy | None = None
    if scoring.reads_old and recipe.num_kept_versions:
        # Only async batches can be sampled by an older version than the learner's: a stage is scored at its beginning.
        versions = host_weights.KeptVersions(learner, lag=recipe.num_kept_versions)
    if recipe.reference is not None:
        folder = recipe.reference.path or recipe.model.path
        require_same_reference(run, learner, folder)
        reference = host_weights.ReferencePolicy(learner, folder)
    turns: GpuTurns | None = None
    if gpu_lock is not None:
        assert isinstance(channel, StreamedChannel), "the recipe asks for ipc"
        turns = GpuTurns(
            learner=learner,
            lock=gpu_lock,
            put_engines_to_sleep=channel.put_engines_to_sleep,
            deadline_s=recipe.rollout.start_deadline_s,
        )
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
            patience=Patience(noted_in(event_log.event), *WAITS),
            **stops,
        ),
        learner=learner,
        schedule=recipe.build_schedule(),
        updates_per_batch=updates,
    )
    return Trainer(
        **shared,
        old_logprobs=OldLogprobs(**shared, versions=versions) if scoring.reads_old else None,
        advantage_computer=advantages,
        scoring=scoring,
        lr_by_lag=recipe.learner.optimizer.lr_by_lag,
        channel=channel,
        turns=turns,
        checkpoints=checkpoints,
        checkpoint_every=checkpoint_every or recipe.checkpoint.every,
        event_log=event_log,
        reference=reference,
        controller=controller,
    )


def build_rates(run: RunDirectory) -> LearningRates:
    """Return the learning rates of all steps of a run, by the recipes that it has had."""
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


def build_weight_check_plan(recipe: Recipe) -> WeightCheckPlan:
    tokenizer = build_tokenizer(recipe)
    allowed = recipe.weights.probe_max_gap_nats
    return WeightCheckPlan(
        rows=probe_rows(
            tokenizer.vocab_size,
            {tokenizer.eos_token_id, tokenizer.pad_token_id},
            recipe.run.seed,
            num_rows=max(NUM_ROWS if has_cuda() else NUM_ROWS_ON_CPU, recipe.learner.data_parallel),
            row_tokens=min(ROW_TOKENS, recipe.rollout.context_tokens - 1),
        ),
        max_mean_gap_nats=MAX_GAP_NATS[coarser_precision(recipe)] if allowed is None else allowed,
        new_checksums=checksums_maker(recipe),
        dtype=engine_dtype(recipe),
    )


def coarser_precision(recipe: Recipe) -> RolloutPrecision:
    """Return the coarser of the learner's and the engines' precision, which decides how far the two may differ.

    A learner that emulates the engines' block FP8 counts as BF16: the mean gap was at most 0.052 nats over 48 versions
    of two BF16 runs, and up to 0.105 without emulation. Emulated fp8_tensor does not, since its scales depend on the
    engine's tensor parallel size and kernels.
    """
    if recipe.learner.fp8_emulation and recipe.rollout.precision == "fp8_block":
        return "bf16"
    learner: RolloutPrecision = "fp8_tensor" if recipe.learner.precision == "fp8_delayed" else recipe.learner.precision
    return max(recipe.rollout.precision, learner, key=lambda precision: MAX_GAP_NATS[precision])

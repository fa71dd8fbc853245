"""The learner program, one process a rank: `torchrun … -m launch.run.learn_rank RUN`, by the agent of its host.

With `--replay SOURCE` it trains on the recorded batches of another run, without engines.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NoReturn

import torch.distributed as dist

from launch.build.algorithm import build_objective
from launch.build.components import (
    build_contract,
    build_limits,
    build_quant_map,
    build_tokenizer,
    require_engines_here,
)
from launch.build.control import build_controller, older_maps
from launch.build.sizes import checkpoint_bytes
from launch.build.trainer import build_rates, build_trainer
from launch.build.weight_checks import build_weight_check_plan
from launch.run.collect import build_fleet, fleet_settings
from launch.run.environment import environment, learner_facts
from launch.run.metrics import metrics_of, observers_of
from launch.run.processes import run_child
from launch.run.waiting import BEGUN, EPOCH_VARIABLE, Stop, rank_epoch, wait_for_engines
from megatron_bridge.learner import MegatronLearner
from megatron_bridge.model.te_precision import Layers
from megatron_bridge.weight_sync.deltas.channel import DeltaChannel
from megatron_bridge.weight_sync.disk import DiskChannel
from megatron_bridge.weight_sync.ipc_transport import IpcTransport
from megatron_bridge.weight_sync.map_transition import MapTransition
from megatron_bridge.weight_sync.probe import ProbeScorer
from megatron_bridge.weight_sync.process_group_transport import ProcessGroupTransport
from megatron_bridge.weight_sync.streaming import StreamedChannel
from pipeline.child_process import see_own_classes
from pipeline.config.recipe import Recipe
from pipeline.data.epochs import Epoch, claim, epoch_folder
from pipeline.data.event_log import EventLog
from pipeline.data.run_directory import RunDirectory
from pipeline.data.store import BatchStore
from pipeline.ports.weight_update import WeightChannel
from pipeline.spans import recorded
from pipeline.trainer.batch_source import STOP_FILE_VARIABLE
from pipeline.trainer.checkpoints import Checkpoints
from rollout_sglang.weights.weight_update import FleetUpdateSession


def build_learner(recipe: Recipe, layers: Layers | None = None) -> MegatronLearner:
    """This rank's part of the model, its optimizer and its objective; `layers` as MegatronLearner.create takes it."""
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
    """How this learner's weights reach the run's engines. Collective. `epoch` is the learner's; tools have none.
    `probe` is that of another channel of the run, if there is one."""
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
    return StreamedChannel(
        learner,
        FleetUpdateSession(membership, **settings, ranks_per_engine=recipe.rollout.tensor_parallel),
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
    """The same for a run whose quant map may change. Collective."""
    probe = ProbeScorer(learner)  # one: what it saw last was published last, by whichever channel
    usual = build_channel(run, recipe, learner, epoch, probe)
    assert not isinstance(usual, DeltaChannel), "the recipe refuses it with a controller"
    disk: DiskChannel | DeltaChannel | StreamedChannel = usual
    if not isinstance(disk, DiskChannel):
        by_disk = recipe.model_copy(update=dict(weights=recipe.weights.model_copy(update=dict(channel="disk"))))
        disk = build_channel(run, by_disk, learner, epoch, probe)
    assert isinstance(disk, DiskChannel), disk
    return MapTransition(usual, disk, build_quant_map(recipe), older_maps(run, recipe, learner))


def learn(run: RunDirectory, replayed: RunDirectory | None) -> None:
    """Train on every batch that the newest checkpoint has not seen, or on those of the run that is replayed."""
    recipe = run.recipe()
    learner = build_learner(recipe)
    learner.rates = build_rates(run)
    epoch = epoch_of(run, learner)
    run = run.under(epoch)
    channel: WeightChannel | None = None
    transition = None
    if replayed is None:
        if recipe.weights.channel == "ipc":  # which looks at once whether all are on this machine
            wait_for_engines(run, recipe, Stop(), recipe.rollout.engines)
        if recipe.controller is not None:
            transition = build_transition(run, recipe, learner, epoch)
        channel = transition or build_channel(run, recipe, learner, epoch)
    metrics = metrics_of("learner", run.path) if learner.is_rank_zero else None
    event_log = EventLog(run.path, epoch.name, observers_of(metrics))
    trainer = build_trainer(
        run,
        recipe,
        learner,
        store=BatchStore((replayed or run).batches, limits=build_limits(recipe)),
        contract=build_contract(recipe, build_tokenizer(recipe)),
        checkpoints=Checkpoints(
            run.checkpoints, recipe.checkpoint.keep, run.fence, checkpoint_bytes(learner.model_config, recipe)
        ),
        event_log=event_log,
        channel=channel,
        controller=build_controller(run, recipe, learner, transition, event_log, replayed),
    )
    _note_environment(run, epoch, learner)
    _note_begun(learner)
    with recorded(run.path, f"{epoch.name}.rank-{dist.get_rank():04}"):
        trainer.train()
        if channel is not None:
            channel.close()


def _note_environment(run: RunDirectory, epoch: Epoch, learner: MegatronLearner) -> None:
    """What each host of the learner is. Files of events have one writer: a rank's own is named by the rank."""
    if int(os.environ.get("LOCAL_RANK", "0")) == 0:
        found = environment()
        facts = learner_facts(learner.model_config, dist.get_world_size(), found["gpus"])
        log = EventLog(run.path, f"{epoch.name}.rank-{dist.get_rank():04}")
        log.event("environment", role="learner", **found, **facts)


def _note_begun(learner: MegatronLearner) -> None:
    """For the agent: from now on there may be something to save."""
    if learner.is_rank_zero and (stop_file := os.environ.get(STOP_FILE_VARIABLE)):
        Path(stop_file).with_name(BEGUN).touch()


def epoch_of(run: RunDirectory, learner: MegatronLearner) -> Epoch:
    """The start of the learner that this rank belongs to: its agent has claimed it; without an agent, rank 0 does."""
    if EPOCH_VARIABLE in os.environ:
        return rank_epoch(run.path)
    return Epoch(epoch_folder(run.path, "learner"), learner.tell(lambda: claim(run.path, "learner").number))


def main(arguments: Sequence[str]) -> NoReturn:
    """`RUN` or `RUN --replay SOURCE`."""
    see_own_classes()
    directory = RunDirectory(Path(arguments[0]))
    replayed = RunDirectory(Path(arguments[2])) if arguments[1:2] == ["--replay"] else None
    epoch = rank_epoch(directory.path) if EPOCH_VARIABLE in os.environ else None

    def body() -> None:
        with nullcontext() if epoch is None else epoch.superseded_said():
            learn(directory, replayed)

    run_child(directory, "learner" if epoch is None else epoch.name, body)

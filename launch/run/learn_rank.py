"""Train as one rank of the learner: `torchrun … -m launch.run.learn_rank RUN`, started by the agent of its host.

With `--replay SOURCE` it trains on another run's recorded batches, without engines. Slow imports stand in `learn`,
since a rank first arranges to die with its parent.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from pipeline.child_process import append_working_folder_to_path, die_with_parent

if TYPE_CHECKING:
    from pipeline.data.run_directory import RunDirectory
    from pipeline.ports.weights import WeightChannel


def learn(run: RunDirectory, replayed: RunDirectory | None) -> None:
    """Train on every batch since the newest checkpoint, read from `replayed` if that is given."""
    import torch.distributed as dist

    from launch.build.components import build_contract, build_limits, build_tokenizer
    from launch.build.control import build_controller
    from launch.build.engines import put_to_sleep
    from launch.build.learner import build_channel, build_learner, build_rates, build_trainer, build_transition
    from launch.build.sizes import checkpoint_bytes
    from launch.run.environment import environment, learner_facts
    from launch.run.metrics import metrics_of, observers_of
    from launch.run.waiting import BEGUN, EPOCH_VARIABLE, Stop, rank_epoch, wait_for_engines
    from pipeline.data.epochs import Epoch, claim, epoch_folder
    from pipeline.data.event_log import EventLog
    from pipeline.data.store import BatchStore
    from pipeline.spans import recorded
    from pipeline.trainer.batches import STOP_FILE_VARIABLE
    from pipeline.trainer.checkpoints import Checkpoints
    from pipeline.trainer.retention import Retention
    from pipeline.trainer.turns import GpuLock

    recipe = run.recipe()
    gpu_lock: GpuLock | None = None
    if recipe.rollout.colocated and replayed is None:
        gpu_lock = GpuLock(run)
        if int(os.environ.get("RANK", "0")) == 0:  # the others wait for it to build their part of the model
            gpu_lock.take(recipe.rollout.start_deadline_s)
            put_to_sleep(run, recipe, rank_epoch(run.path))
    learner = build_learner(recipe)
    learner.rates = build_rates(run)
    if EPOCH_VARIABLE in os.environ:
        epoch = rank_epoch(run.path)  # claimed by the agent
    else:
        epoch = Epoch(epoch_folder(run.path, "learner"), learner.tell(lambda: claim(run.path, "learner").number))
    run = run.under(epoch)
    channel: WeightChannel | None = None
    transition = None
    if replayed is None:
        if (
            recipe.weights.channel == "ipc" and gpu_lock is None
        ):  # the channel checks at once that all engines are on this machine
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
            run.checkpoints,
            recipe.checkpoint.keep,
            run.fence,
            checkpoint_bytes(learner.model_config, recipe),
            Retention(
                run=run,
                keep_batches=recipe.run.keep_batches,
                keep_logprobs=recipe.run.keep_logprobs,
                solved_at=recipe.reward.solved_at,
            ).apply,
        ),
        event_log=event_log,
        channel=channel,
        controller=build_controller(run, recipe, learner, transition, event_log, replayed),
        gpu_lock=gpu_lock,
    )
    source = f"{epoch.name}.rank-{dist.get_rank():04}"  # one writer per event file: the rank names it
    if int(os.environ.get("LOCAL_RANK", "0")) == 0:
        found = environment()
        facts = learner_facts(learner.model_config, dist.get_world_size(), found["gpus"])
        EventLog(run.path, source).event("environment", role="learner", **found, **facts)
    if learner.is_rank_zero and (stop_file := os.environ.get(STOP_FILE_VARIABLE)):
        Path(stop_file).with_name(BEGUN).touch()  # tells the agent that there may be something to save
    with recorded(run.path, source):
        trainer.train()
        if channel is not None:
            channel.close()


def main(arguments: Sequence[str]) -> NoReturn:
    from launch.run.processes import run_child
    from launch.run.waiting import EPOCH_VARIABLE, rank_epoch
    from megatron_bridge.parallel.layout import set_gpu_environment
    from pipeline.data.run_directory import RunDirectory

    append_working_folder_to_path()
    directory = RunDirectory(Path(arguments[0]))
    replayed = RunDirectory(Path(arguments[2])) if arguments[1:2] == ["--replay"] else None
    epoch = rank_epoch(directory.path) if EPOCH_VARIABLE in os.environ else None

    def body() -> None:
        recipe = directory.recipe()
        set_gpu_environment(recipe.learner, weights_shared=recipe.weights.channel == "ipc")
        with nullcontext() if epoch is None else epoch.as_superseded():
            learn(directory, replayed)

    run_child(directory, "learner" if epoch is None else epoch.name, body)


if __name__ == "__main__":
    die_with_parent()
    main(sys.argv[1:])

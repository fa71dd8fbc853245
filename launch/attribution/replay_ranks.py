"""Train again on recorded batches, as one learner rank, to export the weights of some versions.

python -m launch.attribution.replay_ranks RUN SOURCE VERSION,VERSION      RUN: written to, SOURCE: only read
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from launch.attribution.measure import checkpoint_before
from launch.build.components import build_contract, build_limits, build_tokenizer
from launch.build.control import build_controller
from launch.build.learner import build_learner, build_rates, build_trainer
from launch.run.processes import run_child
from megatron_bridge.learner import MegatronLearner
from megatron_bridge.weight_sync.disk import BackgroundChannel
from pipeline.background import tell_when_done
from pipeline.child_process import append_working_folder_to_path, die_with_parent
from pipeline.data.event_log import EventLog
from pipeline.data.run_directory import RunDirectory, numbered
from pipeline.data.store import BatchStore, refuse_to_pass_gone
from pipeline.trainer.checkpoints import Checkpoints


class AllExportedError(Exception):
    """Raised when all wanted versions are exported, to end the training."""


class ExportChannel(BackgroundChannel):
    """A channel that exports the wanted versions to disk, and publishes to no engine. Collective."""

    def __init__(self, learner: MegatronLearner, folder: Path, wanted: set[int]) -> None:
        self._learner, self._folder, self._wanted = learner, folder, wanted

    def begin(self, version: int, *, learner_waits: bool = False) -> None:  # noqa: ARG002
        """Export the version if it is wanted. Raises AllExportedError after the last."""
        if version in self._wanted:
            self._learner.export(self._folder / numbered(version))
            self._wanted.discard(version)
        if not self._wanted:
            raise AllExportedError

    def close(self) -> None:
        """Do nothing: nothing is open."""


def replay(run: RunDirectory, source: RunDirectory, wanted: set[int]) -> None:
    """Export the versions into RUN/weights. Collective. Raises StoreError and the trainer's errors."""
    recipe = run.recipe()
    learner = build_learner(recipe)
    learner.rates = build_rates(source)
    checkpoints = Checkpoints(run.checkpoints, recipe.checkpoint.keep)
    tell_when_done(learner, lambda: _bring_checkpoint(source, run, min(wanted)))  # the whole checkpoint is copied
    channel = ExportChannel(learner, run.path / "weights", wanted)
    event_log, store = EventLog(run.path, "replay"), BatchStore(source.batches, limits=build_limits(recipe))
    trainer = build_trainer(
        run,
        recipe,
        learner,
        store=store,
        contract=build_contract(recipe, build_tokenizer(recipe)),
        checkpoints=checkpoints,
        event_log=event_log,
        channel=channel,
        checkpoint_every=recipe.run.steps + 1,
        controller=build_controller(run, recipe, learner, None, event_log, source),  # it set learning rates
    )
    try:
        restored, _ = checkpoints.restore(learner)
        learner.tell(lambda: refuse_to_pass_gone(source, restored, max(wanted)))
        channel.publish(restored)  # a checkpoint holds the version of its own number
        trainer.train()
    except AllExportedError:
        learner.barrier()


def _bring_checkpoint(source: RunDirectory, run: RunDirectory, version: int) -> None:
    """Copy the newest checkpoint up to `version`, and the old log-probabilities of the stages before it."""
    if (step := checkpoint_before(source, version)) is None:
        return
    shutil.copytree(source.checkpoints / numbered(step), run.checkpoints / numbered(step))
    for kept in source.logprobs.glob("*-old.npy"):
        shutil.copy(kept, run.logprobs / kept.name)


if __name__ == "__main__":
    die_with_parent()
    append_working_folder_to_path()
    directory = RunDirectory(Path(sys.argv[1]))
    versions = {int(version) for version in sys.argv[3].split(",")}
    run_child(directory, "replay", lambda: replay(directory, RunDirectory(Path(sys.argv[2])), versions))

"""The learner loop, run by every rank.

store ──batch──▶ advantages ──▶ mini-batches ──▶ learner.score ──▶ learner.update ──▶ channel.publish ──▶ engines
                                      ▲       updates_per_batch times          │      ▲
                                      └────────────────────────────────────────┘      └── controller, where there is one

train     consumes: batch `step` of the store, in order
          waits for: that batch's file (pipeline.trainer.batch_source)
          unblocked by: the collector's commit, or a request to stop
publish   consumes: the weights as they are after a step; then the next step may change them
          waits for: the version before, and in sync for this one (Schedule.overlaps)
          unblocked by: the engines; what failed is raised at the next `finish`, before anything else is published; or a
          request to stop: engines may have been asked to end, too, and the next start publishes its checkpoint
after a crash: the newest committed checkpoint is loaded and the batches after it, which are still in the store, are
trained again; versions that the engines already serve are not published a second time. What reports and diagnoses
need of a step is written before its checkpoint: a step that is not trained again has left it.
rank 0 alone looks at the run directory and writes to it; the others do as it tells, and end as it ends (Learner.tell).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

from pipeline import spans
from pipeline.advantages.compute import AdvantageComputer
from pipeline.background import ANSWER_S
from pipeline.control.loop import StepController
from pipeline.data.batch import Batch
from pipeline.data.event_log import EventLog
from pipeline.data.files import remove_leftovers
from pipeline.data.mismatch_files import write_mismatch
from pipeline.data.run_directory import RunDirectory
from pipeline.errors import EngineUnavailableError, StoppedError
from pipeline.ports.learner import Learner, Update
from pipeline.ports.weight_update import WeightChannel
from pipeline.schedule import Schedule
from pipeline.stopwatch import Stopwatch
from pipeline.trainer.batch_figures import asked_solve_rate, describe
from pipeline.trainer.batch_source import BatchSource
from pipeline.trainer.checkpoints import Checkpoints, Saved
from pipeline.trainer.kept_versions import KeptVersions
from pipeline.trainer.mini_batches import merge_updates, mini_batches
from pipeline.trainer.old_logprobs import OldLogprobs
from pipeline.trainer.reference import Reference, with_reference
from pipeline.trainer.replay_effect import ReplayEffect
from pipeline.trainer.scoring import Scoring
from pipeline.trainer.step_size import StepSize

LAST_PUBLISH_S = 15.0
"""For what is on its way to the engines, once the process was asked to end and everything is saved."""
STOP_SPREAD_S = 10.0
"""A request to stop may reach the engines so long before the learner, where it goes to all."""
_POLL_S = 0.25
T = TypeVar("T")


@dataclass
class Trainer:
    """See the module's head for the data flow. `channel` is None when recorded batches are replayed."""

    run: RunDirectory
    batches: BatchSource
    learner: Learner
    schedule: Schedule
    advantage_computer: AdvantageComputer
    scoring: Scoring
    updates_per_batch: int
    """Optimizer steps of a batch, at most."""
    old_logprobs: OldLogprobs | None
    """None when nothing divides by pi_old."""
    channel: WeightChannel | None
    checkpoints: Checkpoints
    checkpoint_every: int
    event_log: EventLog
    controller: StepController | None = None
    step_size: StepSize = field(default_factory=StepSize)
    reference: Reference | None = None
    """What the loss holds the policy near; None: nothing."""
    _saved: int = field(init=False, default=0)
    """Steps that the newest checkpoint holds."""
    _save_s: float = field(init=False, default=0.0)
    """What the steps waited for checkpoints since the last line of metrics; the rest of a save is beside them."""
    _moving: int | None = field(init=False, default=None)
    """The version that is on its way to the engines."""
    _refused: bool = field(init=False, default=False)
    """Whether no engine took that version, and the process was asked to end: so were they."""
    _published: dict[str, float] = field(init=False, default_factory=dict)
    """What was measured of the version whose publish ended since the last line of metrics."""

    def train(self) -> None:
        """Train on every batch that the newest checkpoint has not seen, then export the final policy. Asked to stop, it
        saves what is trained and raises StoppedError, on every rank."""
        for folder in (self.run.policies, self.run.mismatch, self.run.logprobs):
            self.learner.tell(partial(remove_leftovers, folder, self.run.fence))
        self.checkpoints.remove_partial(self.learner)
        first, state = self.checkpoints.restore(self.learner, self._versions)
        self._saved = first
        self.advantage_computer.estimator.restore(state)
        if self.controller is not None:
            self.controller.restore(first)
        if first:
            self._publish(first - 1)  # its folder, or PUBLISHED, may have been lost by damage
            self._finish()
        for step in range(first, self.schedule.steps):
            try:
                with spans.span("step", "step", step=step):
                    self._train_on(step)
            except StoppedError:  # before the first update of this step
                self._finish_save()
                if step > self._saved:
                    self._save(step)
                    self._finish_save()
                self._finish(LAST_PUBLISH_S)
                raise
        self._finish()
        self._finish_save()
        if self.learner.tell(self.batches.stop_requested):  # and then the last version may not be published
            raise StoppedError("asked to end before the final policy was exported; start the run again to go on")
        self.learner.export(self.run.model, self.run.fence)

    def _train_on(self, step: int) -> None:
        """One step of the loop: wait, update, publish, record, save."""
        watch = Stopwatch(lane="step", step=step)
        with watch.phase("publish"):
            if self._moving is not None and not self.batches.is_there(step):
                self._finish()  # there is nothing to do meanwhile, and what failed may be what the batch waits for
        with watch.phase("wait"):
            batch = self.batches.wait(step, meanwhile=self._look_at_save)
        if batch is None:
            self._skip(step)
            return
        update = self._update(batch, watch)
        solved_at = self.advantage_computer.solved_at
        measured = describe(batch, step, solved_at) | self.advantage_computer.measured(batch)
        self.advantage_computer.estimator.observe(
            solve_rate=asked_solve_rate(batch, solved_at), entropy=update.metrics["entropy"]
        )
        with watch.phase("publish"):
            self._finish()
            # What is decided holds from the next version on, so it is decided before that is published.
            controlled = {} if self.controller is None else self.controller.after(batch, update)
            self._publish(step)
        with watch.phase("record"):
            self.learner.tell(lambda: self._record(step, update, measured | controlled, watch))
        self._look_at_save()
        self._save_if_due(step + 1)

    def _skip(self, step: int) -> None:
        """A step whose batch was lost by damage: the next version has the weights of this one."""
        self._finish()
        if self._versions is not None:
            self._versions.keep(step)
        if self.controller is not None:
            self.controller.skip(step)
        self._publish(step)
        self.learner.tell(partial(self.run.note_skipped, step))
        self.learner.tell(partial(self.event_log.event, "skipped", step=step))
        self._save_if_due(step + 1)

    def _save_if_due(self, step: int) -> None:
        if step % self.checkpoint_every == 0 or step == self.schedule.steps:
            self._save(step)

    def _record(self, step: int, update: Update, measured: dict[str, Any], watch: Stopwatch) -> None:
        """What the step leaves behind (rank 0). Of a version that moves beside training, the next step's line tells."""
        published, self._published = self._published, {}
        self.run.write_learner_logprobs(step, update.logprobs)
        if update.mismatch is not None:
            write_mismatch(self.run, step, update.mismatch)
        self.event_log.event("consumed", step=step)
        self.event_log.metrics(
            step,
            **update.metrics,
            **measured,
            **self.advantage_computer.estimator.measured(),
            log_ratio_histogram=update.histogram,
            mismatch={} if update.mismatch is None else update.mismatch.by_split(),
            seconds=watch.seconds | {"save": self._save_s},
            publish_seconds={name: value for name, value in published.items() if name.endswith("_s")},
            **{name: value for name, value in published.items() if not name.endswith("_s")},
        )
        self._save_s = 0.0

    def _update(self, batch: Batch, watch: Stopwatch) -> Update:
        """The optimizer steps of one batch."""
        old_logprobs = self.old_logprobs.of(batch, watch, self._look_at_save) if self.old_logprobs else None
        with watch.phase("logprobs"):
            batch = with_reference(self.reference, batch)
            if self._versions is not None:
                self._versions.keep(batch.index)
        scores = self.scoring.of_step(old_known=old_logprobs is not None)
        of_batch = self.step_size.of_batch(batch)
        parts, updates = mini_batches(self.advantage_computer, batch, self.updates_per_batch), []
        with watch.phase("logprobs"):
            effect = ReplayEffect.before_step(self.learner, parts[0].batch)
        for part in parts:
            old = part.part_of(old_logprobs)
            with watch.phase("logprobs"):
                scored = self.learner.score(part.batch) if scores else None
                sized = self.step_size.measured(of_batch, part.batch, scored, old)
            with watch.phase("update"):
                update = self.learner.update(
                    part.batch,
                    part.advantages,
                    scored,
                    old_logprobs=old,
                    trained=part.trained,
                    lr_factor=sized["lr_factor"],
                )
                updates.append(replace(update, metrics=update.metrics | sized | part.counted()))
        measured = {} if effect is None else effect.measured(parts[0].batch, updates[0].device_logprobs)
        merged = merge_updates(parts, updates)
        return replace(merged, metrics=merged.metrics | measured)

    @property
    def _versions(self) -> KeptVersions | None:
        """Older versions, where they are kept."""
        return None if self.old_logprobs is None else self.old_logprobs.versions

    def _publish(self, step: int) -> None:
        """Give version `step + 1` to the engines when the schedule says so and it is not published already, unless the
        process is asked to end. The last one is waited for: no step follows to be trained meanwhile."""
        version = step + 1
        if self.channel is None or not self.schedule.publishes_after(step):
            return
        if self.learner.tell(lambda: self.batches.stop_requested() or self._is_published(version)):
            return
        learner_waits = not self.schedule.overlaps or version == self.schedule.steps
        self.channel.begin(version, learner_waits=learner_waits)
        self._moving = version
        if learner_waits:
            self._finish()

    def _finish(self, after_stop_s: float = 0.0) -> None:
        """Wait for the version that is on its way, but for no longer than `after_stop_s` once the process is asked to
        end: it stays `_moving` then. Raises on every rank what failed, unless engines were asked to end as well."""
        if self._moving is None:
            return
        assert self.channel is not None
        began = time.monotonic()
        if not self._asked_on(lambda: self._is_over(began + after_stop_s)):
            return
        version, self._moving = self._moving, None
        try:
            measured = self.channel.finish()
        except EngineUnavailableError:
            ends = time.monotonic() + STOP_SPREAD_S
            if not self._asked_on(lambda: self._stop_comes(ends)):
                raise
            self._refused = True
        else:
            self._note(version, measured)

    def _asked_on(self, look: Callable[[], T | None]) -> T:
        """What `look` says on rank 0, which is asked again and again until it says something. Collective."""

        def answer() -> T | None:
            ends = time.monotonic() + ANSWER_S
            while (found := look()) is None and time.monotonic() < ends:
                pass
            return found

        while (told := self.learner.tell(answer)) is None:
            pass
        return told

    def _is_over(self, after_stop: float) -> bool | None:
        """Whether what moves has ended; False when it is not waited for any more. Waits a moment. On rank 0."""
        assert self.channel is not None
        if self.channel.is_over(_POLL_S):
            return True
        return False if time.monotonic() >= after_stop and self.batches.stop_requested() else None

    def _stop_comes(self, ends: float) -> bool | None:
        """Whether the process is asked to end before the time `ends`. Waits a moment. On rank 0."""
        if self.batches.stop_requested():
            return True
        if time.monotonic() >= ends:
            return False
        time.sleep(_POLL_S)
        return None

    def _note(self, version: int, measured: dict[str, float]) -> None:
        # The run's last line has room for one of its two versions; the event keeps every one.
        said = dict(version=version, seconds=measured.get("publish_s"), measured=measured)  # known to rank 0
        self.learner.tell(partial(self.event_log.event, "published", **said))
        self._published |= measured

    def _is_published(self, version: int) -> bool:
        """Served, and kept for engines that restart: a channel may have died between the two, then the version that the
        engines serve is published again. On rank 0."""
        self.run.fence()
        published = self.run.published_version()
        return version < published or (version == published and self.run.policy_directory(version).is_dir())

    def _save(self, step: int) -> None:
        """A checkpoint of the first `step` steps: it is copied now, and written while the next steps are trained. An
        older version than its own must be served and kept by then: a learner that goes on from it could not publish
        that again. For one that is asked to end this holds within a stage alone, and without it nothing is saved:
        elsewhere the next start publishes the checkpoint's own version."""
        within_stage = not self.schedule.publishes_after(step - 1)
        if self.channel is not None and self._moving != step:
            self._finish(math.inf if within_stage else 0.0)
            if within_stage and self._refused:
                return
            if self._moving is None and (within_stage or not self.learner.tell(self.batches.stop_requested)):
                self.channel.wait_for_folder()
        started = time.monotonic()
        with spans.span("step", "save", step=step - 1):
            self._finish_save()
            state = self.advantage_computer.estimator.state()
            self.checkpoints.begin_save(self.learner, step, state, self._versions)
            self._look_at_save()
        self._save_s = time.monotonic() - started

    def _look_at_save(self) -> None:
        """Commit the checkpoint that is being written, once all of it is. Also while a batch is waited for: that may
        take hours, and a kill in them must not cost a checkpoint that is whole."""
        self._note_saved(self.checkpoints.advance(self.learner))

    def _finish_save(self) -> None:
        """Wait for the checkpoint that is being written."""
        self._note_saved(self.checkpoints.advance(self.learner, to_the_end=True))

    def _note_saved(self, saved: Saved | None) -> None:
        if saved is not None:
            self._saved = saved.step
            self.learner.tell(partial(self.event_log.event, "saved", step=saved.step, seconds=saved.seconds))

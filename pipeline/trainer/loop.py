"""Train on the run's batches: the learner loop, run by every rank.

store ──batch──▶ advantages ──▶ log-probabilities ──▶ learner.update ──▶ channel.publish ──▶ engines
                                       ▲     updates_per_batch times │        ▲
                                       └─────────────────────────────┘        └── controller, where there is one

train     consumes: batch `step` of the store, in order
          waits for: that batch's file (pipeline.trainer.batches)
          unblocked by: the collector's commit, or a request to stop
publish   consumes: the weights after a step; then the next step may change them
          waits for: the version before, and in sync for its own version (Schedule.overlaps)
          unblocked by: the engines; the next `finish` raises a failure, before anything else is published; or a request
          to stop, which the engines may have received too: the next start publishes its checkpoint
record    consumes: the measurements of a step, which explain a run and decide nothing. A thread writes them beside the
          next steps; it has written all before a checkpoint and at the end
after a crash: the learner loads the newest committed checkpoint and trains again on the later batches, which are still
in the store. It does not publish again a version that the engines already serve.
Only rank 0 reads and writes the run directory; the other ranks get its decisions and errors through `tell`.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from pipeline import spans
from pipeline.advantages.compute import AdvantageComputer
from pipeline.background import ANSWER_S, DiagnosticsWriter, tell_when_done
from pipeline.control.step_controller import StepController, mean_age
from pipeline.data.batch import Batch
from pipeline.data.event_log import EventKind, EventLog
from pipeline.data.files import drop_listing, remove_leftovers
from pipeline.data.mismatch_files import write_mismatch
from pipeline.data.run_directory import RunDirectory
from pipeline.data.store import REMOVED
from pipeline.errors import EngineUnavailableError, NonFiniteError, StoppedError
from pipeline.ports.learner import Update
from pipeline.ports.weights import WeightChannel
from pipeline.schedule import Schedule
from pipeline.spans import Stopwatch
from pipeline.trainer.batches import BatchSource, MiniBatch, asked_solve_rate, describe, merge_updates, mini_batches
from pipeline.trainer.checkpoints import Checkpoints
from pipeline.trainer.old_logprobs import OldLogprobs
from pipeline.trainer.turns import GpuTurns
from precision.ratios import LrByLag, RatioSums, lr_factor, staleness_ess
from precision.torch_on_use import Tensor, torch

if TYPE_CHECKING:
    from megatron_bridge.learner import MegatronLearner
    from megatron_bridge.step.host_weights import KeptVersions, ReferencePolicy

LAST_PUBLISH_S = 15.0
"""Time for the publish under way once the process was asked to stop and everything is saved."""
STOP_SPREAD_S = 10.0
"""Longest time by which a stop request for the whole run reaches the engines before the learner."""
_POLL_S = 0.25


@dataclass
class Trainer:
    """The learner loop; see the module's docstring. `channel` is None when recorded batches are replayed."""

    run: RunDirectory
    batches: BatchSource
    learner: MegatronLearner
    schedule: Schedule
    advantage_computer: AdvantageComputer
    scoring: Scoring
    updates_per_batch: int
    """Most optimizer steps on a batch."""
    old_logprobs: OldLogprobs | None
    """None if nothing divides by pi_old."""
    channel: WeightChannel | None
    checkpoints: Checkpoints
    checkpoint_every: int
    event_log: EventLog
    controller: StepController | None = None
    turns: GpuTurns | None = None
    """Where engines and learner take turns on the same GPUs."""
    lr_by_lag: LrByLag = "none"
    reference: ReferencePolicy | None = None
    """The frozen policy that the loss keeps the policy near."""
    _diagnostics: DiagnosticsWriter = field(init=False, default_factory=DiagnosticsWriter)
    _versions: KeptVersions | None = field(init=False)
    """Older policy versions, if the run keeps them."""
    _saved: int = field(init=False, default=0)
    """Number of steps in the newest checkpoint."""
    _save_s: float = field(init=False, default=0.0)
    """Time that steps waited for checkpoints since the last line of metrics; the rest of a save overlaps training."""
    _moving: int | None = field(init=False, default=None)
    """The version being published."""
    _refused: bool = field(init=False, default=False)
    """Whether no engine took that version because a stop request had reached the engines too."""
    _published: dict[str, float] = field(init=False, default_factory=dict)
    """Measurements of the publish that ended since the last line of metrics."""

    def __post_init__(self) -> None:
        self._versions = None if self.old_logprobs is None else self.old_logprobs.versions

    def train(self) -> None:
        """Train on every batch after the newest checkpoint, then export the final policy. On a stop request, save the
        trained steps and raise StoppedError, on every rank."""
        written = (self.run.policies, self.run.mismatch, self.run.logprobs, self.run.checkpoints)
        for folder in (*written, self.run.batches / REMOVED):
            tell_when_done(self.learner, partial(remove_leftovers, folder, self.run.fence))
        tell_when_done(self.learner, partial(drop_listing, self.run.published))  # else engines may get an older version
        first, state = self.checkpoints.restore(self.learner, self._versions)
        self._saved = first
        if first == self.schedule.steps:  # no checkpoint follows: an earlier start may have been killed after its last
            tell_when_done(self.learner, self.checkpoints.retain)
        self.advantage_computer.estimator.restore(state)
        if self.controller is not None:
            self.controller.restore(first)
        try:
            if first:
                self._publish(first - 1)  # damage may have lost the version's folder or PUBLISHED
                self._finish_publish()
            for step in range(first, self.schedule.steps):
                try:
                    with spans.span("step", "step", step=step):
                        self._train_on(step)
                except StoppedError:  # raised before the first update of this step
                    self._advance_save(to_the_end=True)
                    if step > self._saved and self.turns is None:  # else parked, while engines hold the memory
                        self._save(step)
                        self._advance_save(to_the_end=True)
                    self._finish_publish(LAST_PUBLISH_S)
                    raise
            self._finish_publish()
            self._advance_save(to_the_end=True)
        finally:
            self._diagnostics.close()
        if self.learner.tell(self.batches.stop_requested):  # the last version may then be unpublished
            raise StoppedError("asked to end before the final policy was exported; start the run again to go on")
        self.learner.export(self.run.model, self.run.fence)

    def _train_on(self, step: int) -> None:
        """Train on batch `step`: batch, advantages, log-probabilities, updates, publish, record, save."""
        watch, computer = Stopwatch(lane="step", step=step), self.advantage_computer
        with watch.phase("publish"):
            if self._moving is not None and not self.batches.is_there(step):
                self._finish_publish()  # nothing else to do, and a failed publish may be why no batch comes
        with watch.phase("wait"):
            batch = self.batches.wait(step, meanwhile=self._advance_save)
        if batch is None:
            self._skip(step)
            return
        if self.turns is not None:
            with watch.phase("publish"):
                self.turns.take()

        advantages = computer.compute_advantages(batch)

        old_logprobs = None if self.old_logprobs is None else self.old_logprobs.of(batch, watch, self._advance_save)
        with watch.phase("logprobs"):
            if self.reference is not None:
                batch = replace(batch, reference_logprobs=self.reference.logprobs(batch))
            if self._versions is not None:
                self._versions.keep(step)
            parts = mini_batches(computer, batch, advantages, self.updates_per_batch)
            own_experts = OwnExperts.score(self.learner, parts[0].batch)

        lr_by_age = lr_factor(mean_age(batch, self.updates_per_batch)) if self.lr_by_lag == "sqrt" else 1.0
        most = lr_by_age if self.controller is None else min(lr_by_age, self.controller.lr_factor(batch))
        updates = [self._update(part, old_logprobs, most, watch) for part in parts]
        update = merge_updates(parts, updates)
        if own_experts is not None:
            effect = own_experts.compared(parts[0].batch, updates[0].device_logprobs)
            update = replace(update, metrics=update.metrics | effect)
        solve_rate = asked_solve_rate(batch, computer.solved_at)
        computer.estimator.observe(solve_rate=solve_rate, entropy=update.metrics["entropy"])

        with watch.phase("publish"):
            self._finish_publish()
            # A decision holds from the next version on, so it precedes that version's publish.
            controlled = {} if self.controller is None else self.controller.after(batch, update)
        if self.turns is not None:  # saved before the publish parks what is to be saved
            self._save_if_due(step + 1)
        with watch.phase("publish"):
            self._publish(step)

        with watch.phase("record"):
            self._record(batch, update, controlled, watch)
            self._advance_save()
        if self.turns is None:
            self._save_if_due(step + 1)

    def _update(self, part: MiniBatch, old_logprobs: Tensor | None, most_lr: float, watch: Stopwatch) -> Update:
        """Take one optimizer step on a part of a batch, scored before it where the scores are used. `old_logprobs`
        [responses of the whole batch] are pi_old, or None if pi_old is the step's own policy. The learning-rate factor
        is at most `most_lr`. Raises NonFiniteError for a log-probability that is not finite."""
        old = None
        if old_logprobs is not None:
            old = old_logprobs[torch.from_numpy(part.responses).to(old_logprobs.device)]
        measured = dict(lr_factor=most_lr)
        with watch.phase("logprobs"):
            is_scored = self.scoring.of_step(old_known=old is not None)
            scored = self.learner.score(part.batch) if is_scored else None
            if self.lr_by_lag == "ess":
                ess = 1.0
                if old is not None:
                    assert scored is not None  # Scoring.sizes_steps
                    sampled = torch.from_numpy(part.batch.loss_mask).to(scored.device)
                    rollout = torch.from_numpy(part.batch.rollout_logprobs).to(scored.device)[sampled].double()
                    before = old.to(scored.device)[sampled].double()
                    try:
                        ess = staleness_ess(before - rollout, scored[sampled].double() - before)
                    except FloatingPointError as error:
                        raise NonFiniteError(f"batch {part.batch.index}: {error}") from error
                # 1 while nothing is stale, .8 at .96, .29 at .5: √(1 - e) is about the spread of the ratios. VCPO
                # (arXiv 2602.17616) scales by an ESS in another form.
                measured = dict(lr_factor=min(most_lr, 1.0 - math.sqrt(1.0 - ess)), staleness_ess=ess)
        with watch.phase("update"):
            update = self.learner.update(
                part.batch,
                part.advantages,
                scored,
                old_logprobs=old,
                trained=part.trained,
                lr_factor=measured["lr_factor"],
            )
        return replace(update, metrics=update.metrics | measured | part.counts)

    def _record(self, batch: Batch, update: Update, controlled: dict[str, float], watch: Stopwatch) -> None:
        """Queue a step's measurements for writing beside the next steps. A version published beside training is
        measured in the next step's line. Raises NonFiniteError, on every rank, for a metric that is not finite."""
        for name, value in update.metrics.items():
            if not math.isfinite(value):
                raise NonFiniteError(f"{name} is {value}, expected a finite number; find where it diverged before it")
        if not self.learner.is_rank_zero:
            return
        step, computer = batch.index, self.advantage_computer
        published_s, published = dict[str, float](), dict[str, float]()
        for name, value in self._published.items():
            (published_s if name.endswith("_s") else published)[name] = value
        self._published = {}
        fields = dict(
            **update.metrics,
            **describe(batch, step, computer.solved_at),
            **computer.measured(batch),
            **controlled,
            **computer.estimator.measured(),
            log_ratio_histogram=update.histogram,
            seconds=watch.seconds | {"save": self._save_s},
            publish_seconds=published_s,
            **published,
        )
        self._save_s, logprobs, now = 0.0, update.logprobs, time.time()

        def write() -> None:
            self.run.write_logprobs(step, logprobs)
            if update.mismatch is not None:
                write_mismatch(self.run, step, update.mismatch)
            self.event_log.event("consumed", step=step, time=now)
            by_split = {} if update.mismatch is None else update.mismatch.by_split()
            self.event_log.metrics(step, time=now, mismatch=by_split, **fields)

        self._diagnostics.put(write, f"step {step}")

    def _note(self, event: EventKind, **fields: Any) -> None:
        """Queue an event for writing beside training."""
        if self.learner.is_rank_zero:
            write = partial(self.event_log.event, event, time=time.time(), **fields)
            self._diagnostics.put(write, f"event {event}")

    def _skip(self, step: int) -> None:
        """Skip a step whose batch was lost by damage: the next version has the same weights."""
        self._finish_publish()
        if self._versions is not None:
            self._versions.keep(step)
        if self.controller is not None:
            self.controller.skip(step)
        self._publish(step)
        self.learner.tell(partial(self.run.note_skipped, step))
        self._note("skipped", step=step)
        self._save_if_due(step + 1)

    def _publish(self, step: int) -> None:
        """Publish version `step + 1` if the schedule publishes it, engines do not serve it yet, and no stop was
        requested. The last version is waited for, because no step follows that could be trained meanwhile."""
        version = step + 1
        if self.channel is None or not self.schedule.publishes_after(step):
            return

        def is_needless() -> bool:
            """Return whether the process is stopping, or engines serve the version and its folder is kept for engines
            that restart (a channel may have died between the two). Runs on rank 0."""
            if self.batches.stop_requested():
                return True
            self.run.fence()
            published = self.run.published_version()
            return version < published or (version == published and self.run.policy_directory(version).is_dir())

        if self.learner.tell(is_needless):
            return
        if self.turns is not None:
            self.turns.give()
        learner_waits = not self.schedule.overlaps or version == self.schedule.steps
        self.channel.begin(version, learner_waits=learner_waits)
        self._moving = version
        if learner_waits:
            self._finish_publish()

    def _finish_publish(self, after_stop_s: float = 0.0) -> None:
        """Wait for the version being published, after a stop request for at most `after_stop_s`; it then stays
        `_moving`. Raises a failure on every rank, unless the engines were asked to stop as well."""
        if self._moving is None:
            return
        channel, after_stop = self.channel, time.monotonic() + after_stop_s
        assert channel is not None

        def is_over() -> bool | None:
            """Return whether the publish has ended: False if the wait is given up, None to be called again."""
            ends = time.monotonic() + ANSWER_S
            while not channel.is_over(_POLL_S):
                if time.monotonic() >= after_stop and self.batches.stop_requested():
                    return False
                if time.monotonic() >= ends:
                    return None
            return True

        while (over := self.learner.tell(is_over)) is None:
            pass
        if not over:
            return
        version, self._moving = self._moving, None
        try:
            measured = channel.finish()
        except EngineUnavailableError:
            if not self._stop_comes():
                raise
            self._refused = True
        else:
            # A line of metrics has room for one of the run's last two versions; events keep both.
            self._note("published", version=version, seconds=measured.get("publish_s"), measured=measured)
            self._published |= measured

    def _stop_comes(self) -> bool:
        """Return whether a stop request arrives within STOP_SPREAD_S, as it may have reached the engines already."""
        ends = time.monotonic() + STOP_SPREAD_S

        def is_asked() -> bool | None:
            answer_at = time.monotonic() + ANSWER_S
            while not self.batches.stop_requested():
                if time.monotonic() >= ends:
                    return False
                if time.monotonic() >= answer_at:
                    return None
                time.sleep(_POLL_S)
            return True

        while (asked := self.learner.tell(is_asked)) is None:
            pass
        return asked

    def _save_if_due(self, step: int) -> None:
        if step % self.checkpoint_every == 0 or step == self.schedule.steps:
            self._save(step)

    def _save(self, step: int) -> None:
        """Begin a checkpoint of the first `step` steps: copy it now, and write it while the next steps are trained. The
        measurements of these steps are on disk first.

        A version older than the checkpoint's must be served and kept by then, because a learner that resumes from the
        checkpoint could not publish it again. After a stop request this holds only within a stage, and nothing is saved
        without it; elsewhere the next start publishes the checkpoint's own version.
        """
        within_stage = not self.schedule.publishes_after(step - 1)
        if self.channel is not None and self._moving != step:
            self._finish_publish(math.inf if within_stage else 0.0)
            if within_stage and self._refused:
                return
            if self._moving is None and (within_stage or not self.learner.tell(self.batches.stop_requested)):
                self.channel.wait_for_folder()
        started = time.monotonic()
        with spans.span("step", "save", step=step - 1):
            self._advance_save(to_the_end=True)
            tell_when_done(self.learner, self._diagnostics.flush)
            state = self.advantage_computer.estimator.state()
            self.checkpoints.begin_save(self.learner, step, state, self._versions)
            self._advance_save()
        self._save_s = time.monotonic() - started

    def _advance_save(self, *, to_the_end: bool = False) -> None:
        """Commit the checkpoint being written once all its files are written. Also runs while waiting for a batch: that
        may take hours, and a kill meanwhile must not cost a complete checkpoint."""
        saved = self.checkpoints.advance(self.learner, to_the_end=to_the_end)
        if saved is not None:
            self._saved = saved.step
            self._note("saved", step=saved.step, seconds=saved.seconds)


@dataclass(frozen=True, kw_only=True)
class Scoring:
    """The choice of the scoring passes that a batch needs."""

    prepares: bool
    """Whether the objective is prepared from scores of the batch (Facts.needs_scoring)."""
    reads_step: bool
    """Whether that preparation reads the log-probabilities just before the step even if older ones are known."""
    reads_old: bool
    """Whether anything divides by pi_old."""
    sizes_steps: bool = False
    """Whether the learning rate depends on how far the policy has moved since pi_old."""

    def of_step(self, *, old_known: bool) -> bool:
        """Return whether an optimizer step is scored. `old_known`: pi_old is another policy, scored beforehand."""
        if not old_known:
            return self.prepares
        return self.sizes_steps or (self.prepares and self.reads_step)

    def passes(self, *, older: bool) -> int:
        """Return the number of passes over a batch. `older`: pi_old is older than any of the batch's steps."""
        beforehand = self.reads_old and older
        return beforehand + self.of_step(old_known=beforehand)


SHARE, LEAST = 16, 16
"""One sample in SHARE, at least LEAST, is scored twice: a forward pass over 1/16 takes 2 % of the training pass."""

MEASURED = ("ess", "k3_kl", "log_ratio_abs_mean")


@dataclass(frozen=True, kw_only=True)
class OwnExperts:
    """Some samples of a batch scored with the learner's own experts, to measure the effect of replaying the engine's.

        before the step   a share of the samples ──learner's own experts──▶ log-probabilities ─┐
        the step itself   all samples ─────────────the engine's experts───▶ log-probabilities ─┴▶ ESS, k3 of the share

    Both scores are at the weights before the step, so they differ only by routing.
    """

    samples: NDArray[np.bool_]
    """[samples of the batch] True for the scored samples."""
    part: Batch
    """The scored samples as a batch."""
    own: Tensor
    """float32 [responses of the part] log-probabilities with the learner's own experts, on the learner's device."""

    @staticmethod
    def score(learner: MegatronLearner, batch: Batch) -> OwnExperts | None:
        """Score one sample in SHARE, at least LEAST; None for a batch without recorded experts. Collective."""
        if batch.experts is None:
            return None
        wanted = min(batch.num_samples, max(LEAST, -(-batch.num_samples // SHARE)))
        samples = np.zeros(batch.num_samples, np.bool_)  # evenly spread, because neighbors answer the same prompt
        samples[np.linspace(0, batch.num_samples - 1, wanted).astype(np.int64)] = True
        part = batch.select(samples)
        return OwnExperts(samples=samples, part=part, own=learner.score(replace(part, experts=None)))

    def compared(self, batch: Batch, logprobs: Tensor) -> dict[str, float]:
        """Return the metrics of MEASURED, each `_with_replay` and `_without_replay`, over the tokens of the step.
        `logprobs` [responses of the batch] are the step's own, on the learner's device, NaN for tokens that it did not
        run."""

        def tensor(values: NDArray[Any]) -> Tensor:
            return torch.from_numpy(values).to(logprobs.device)

        with_replay = logprobs[tensor(np.repeat(self.samples, batch.response_lengths))]
        seen = tensor(self.part.loss_mask) & with_replay.isfinite()
        if not seen.any():
            return {}
        found: dict[str, float] = {}
        for name, scored in (("with", with_replay), ("without", self.own)):
            sums = RatioSums.from_logprobs(scored, tensor(self.part.rollout_logprobs), seen).statistics()
            found |= {f"{measure}_{name}_replay": sums[measure] for measure in MEASURED}
        return found

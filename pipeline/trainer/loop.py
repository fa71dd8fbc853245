"""The learner loop, run by every rank.

store ──batch──▶ learner.logprobs ──scored step──▶ credit ──advantages──▶ learner.update ──▶ channel.publish ──▶ engines

train     consumes: batch `step` of the store, in order
          waits for: that batch's file
          unblocked by: the collector's commit
after a crash: the newest committed checkpoint is loaded and the batches after it, which are still in the store, are
trained again; versions that the engines already serve are not published a second time.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np

from pipeline.advantages.compute import Credit
from pipeline.data.event_log import Journal
from pipeline.data.records import Batch, LogprobContract
from pipeline.data.run_directory import RunDirectory
from pipeline.data.store import BatchStore
from pipeline.ports.learner import Learner
from pipeline.ports.weight_update import WeightChannel
from pipeline.schedule import Schedule
from pipeline.trainer.checkpoints import Checkpoints
from pipeline.trainer.old_logprobs import ProximalLogprobs


@dataclass
class Stopwatch:
    """Seconds by phase of one step."""

    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - started


@dataclass
class Trainer:
    """See the module's head for the data flow. `channel` is None when recorded batches are replayed."""

    run: RunDirectory
    store: BatchStore
    learner: Learner
    schedule: Schedule
    credit: Credit
    scores_step: bool
    """Whether the objective wants the batch scored before the step."""
    proximal: ProximalLogprobs | None
    """None when nothing divides by pi_old."""
    channel: WeightChannel | None
    checkpoints: Checkpoints
    checkpoint_every: int
    contract: LogprobContract
    journal: Journal
    wait_deadline_s: float

    def train(self) -> None:
        """Train on every batch that the newest checkpoint has not seen, then export the final policy."""
        first, state = self.checkpoints.restore(self.learner)
        self.credit.estimator.restore(state)
        for step in range(first, self.schedule.steps):
            watch = Stopwatch()
            with watch.phase("wait"):
                batch = self.store.wait(step, self.contract, deadline_s=self.wait_deadline_s)
            with watch.phase("logprobs"):
                scored = self.learner.logprobs(batch) if self.scores_step else None
                proximal = self.proximal.of(step) if self.proximal else None
            with watch.phase("update"):
                credit = self.credit.assign(batch)
                update = self.learner.update(
                    batch, credit.advantages, scored, proximal=proximal, trained=credit.trained
                )
            measured = describe(batch, step)
            self.credit.estimator.observe(solve_rate=asked_solve_rate(batch), entropy=update.metrics["entropy"])
            with watch.phase("publish"):
                published = self._publish(step)
            with watch.phase("save"):
                self._save(step)
            if self.learner.speaks:
                self.run.write_learner_logprobs(step, update.logprobs)
                self.journal.event("consumed", step=step)
                self.journal.metrics(
                    step,
                    **update.metrics,
                    **measured,
                    **self.credit.estimator.measured(),
                    log_ratio_histogram=update.histogram,
                    seconds=watch.seconds,
                    publish_seconds={name: value for name, value in published.items() if name.endswith("_s")},
                    **{name: value for name, value in published.items() if not name.endswith("_s")},
                )
        self.learner.export(self.run.model)

    def _publish(self, step: int) -> dict[str, float]:
        """Give version `step + 1` to the engines when the schedule says so and it is not published already."""
        version = step + 1
        if self.channel is None or not self.schedule.publishes_after(step) or self._is_published(version):
            return {}
        measured = self.channel.publish(version)
        if self.learner.speaks:
            self.journal.event("published", version=version, seconds=measured["publish_s"])
        return measured

    def _is_published(self, version: int) -> bool:
        """Served, and kept for engines that restart: a channel may have died between the two, then the version that the
        engines serve is published again."""
        published = self.run.published_version()
        return version < published or (version == published and self.run.policy_directory(version).is_dir())

    def _save(self, step: int) -> None:
        if (step + 1) % self.checkpoint_every == 0 or step + 1 == self.schedule.steps:
            if self.channel is not None:
                self.channel.settle()
            started = time.perf_counter()
            self.checkpoints.save(self.learner, step + 1, self.credit.estimator.state())
            if self.learner.speaks:
                self.journal.event("saved", step=step + 1, seconds=time.perf_counter() - started)


def describe(batch: Batch, step: int) -> dict[str, float]:
    """What the batch itself says: reward, staleness in versions, lengths, failed verifiers."""
    lag = step - batch.policy_version
    failed = batch.reward_parts.get("verifier_failed", np.zeros(0, np.float32))
    return dict(
        reward_mean=float(batch.reward.mean()),
        solve_rate=float((batch.reward >= 1).mean()),
        lag_mean=float(lag.mean()),
        lag_max=float(lag.max()),
        truncated_share=float(batch.truncated.mean()),
        response_tokens_mean=float(batch.response_lengths.mean()),
        verifier_failures=float(np.nansum(failed)),
    )


def asked_solve_rate(batch: Batch) -> float:
    """Share of solved samples among all that were sampled for the batch, those of dropped groups included: dynamic
    sampling keeps only groups of mixed outcome, whose rate says little about the policy's."""
    samples = batch.num_samples + sum(group.samples for group in batch.dropped)
    solved = int((batch.reward >= 1).sum()) + sum(group.solved for group in batch.dropped)
    return solved / samples

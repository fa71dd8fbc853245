"""The batches that all ranks train on: rank 0 waits for each, looks whether to stop, and tells the others.

rank 0   lists the batches every second ──"not yet" every few seconds, then "there"──▶ every rank opens the file
                    ▲                                                                        │ reads what is counted in
               stop requested? superseded? ── what ends the wait ends it on every rank       │ samples, deals it out,
                                                                                             ▼ reads its own tokens
numbers of response tokens (9 bytes each) of all samples ◀──exchanged, bit for bit────── its share
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from pipeline.advantages.compute import AdvantageComputer, SampleAdvantages, mean_reverse_kl, taught
from pipeline.background import ANSWER_S, Patience, print_notice
from pipeline.data.batch import OWN_PARTS, SOLVED_REWARD, Batch, LogprobContract, is_solved
from pipeline.data.files import FIRST_POLL_S, VISIBLE_S, fsync_directory, slower
from pipeline.data.run_directory import RunDirectory
from pipeline.data.store import BatchStore
from pipeline.errors import DeadlineExceededError, StoppedError
from pipeline.ports.learner import Update
from precision.mismatch.statistics import Mismatch
from precision.torch_on_use import torch

if TYPE_CHECKING:
    from megatron_bridge.learner import MegatronLearner

STOP_FILE_VARIABLE = "EVENKEEL_STOP_FILE"
"""Names a local file: once it is there, training ends in order."""

Answer = Literal["there", "lost", "not yet", "stop"]


WAITS = ("the learner", "the collector's commit (its log is in RUN/logs)")
"""Who waits for a batch, and what would end the wait (Patience)."""


def stop_file_exists() -> bool:
    """Return whether the process that started this one has asked it to end."""
    name = os.environ.get(STOP_FILE_VARIABLE)
    return name is not None and Path(name).exists()


@dataclass(frozen=True, kw_only=True)
class BatchSource:
    """The committed batches of `store`, for the learner of `run`. Every method is collective."""

    run: RunDirectory
    store: BatchStore
    learner: MegatronLearner
    contract: LogprobContract
    wait_deadline_s: float
    """Longest wait for a batch while the collector commits and evaluates nothing."""
    together: Callable[[Batch], Sequence[NDArray[np.bool_]]] = lambda batch: [np.ones(batch.num_samples, np.bool_)]
    """Masks [samples] of what is run through the model together, from what is counted in samples
    (pipeline.trainer.batches.dealt_together): each is dealt out evenly over the ranks."""
    stop_requested: Callable[[], bool] = stop_file_exists
    """Asked on rank 0 alone."""
    visible_s: float = VISIBLE_S
    patience: Patience = field(default_factory=lambda: Patience(print_notice, *WAITS))
    """Of rank 0."""

    def is_there(self, index: int) -> bool:
        """Whether `wait` for the batch would return at once."""
        return self.learner.tell(lambda: index in self.store.settled())

    def wait(self, index: int, meanwhile: Callable[[], None] = lambda: None) -> Batch | None:
        """Batch `index`, once it is committed; None when it was lost by damage. A rank of several holds its share.
        While it is not there, `meanwhile` is called every few seconds, on every rank.

        Raises on every rank StoppedError when the process was asked to end, DeadlineExceededError, SupersededError, and
        what BatchStore.read raises on any.
        """
        deadline, pause_s = time.monotonic() + self.wait_deadline_s, FIRST_POLL_S
        seen: tuple[int, int] | None = None
        """Changes while the collector gets on: it commits, and it evaluates before it commits."""

        def look() -> Answer:
            """Look for some seconds, on rank 0."""
            nonlocal deadline, pause_s, seen
            ends = time.monotonic() + ANSWER_S
            self.run.fence()
            seen = seen or (len(self.store.committed()), len(self.run.evaluated_versions()))
            while True:
                if self.stop_requested():
                    return "stop"
                if index in self.store.settled():
                    # Its collector may not have come to that: what is trained on must not be gone after a power cut.
                    fsync_directory(self.store.directory)
                    self.patience.progress()
                    return "there" if self.store.lost(index) is None else "lost"
                self.patience.still(f"batch {index}")
                if time.monotonic() >= deadline:
                    before, seen = seen, (len(self.store.committed()), len(self.run.evaluated_versions()))
                    if seen == before:
                        raise DeadlineExceededError(
                            f"waited {self.wait_deadline_s:g} s for batch {index} in {self.store.directory}, and none "
                            "was committed nor a version evaluated; look at the collector's log"
                        )
                    deadline = time.monotonic() + self.wait_deadline_s
                if time.monotonic() >= ends:
                    return "not yet"
                time.sleep(pause_s)
                pause_s = slower(pause_s)

        while (answer := self.learner.tell(look)) == "not yet":
            meanwhile()
        if answer == "stop":
            raise StoppedError(f"asked to end before batch {index}; start the run again to go on")
        if answer == "lost":
            return None
        found: list[Batch] = []
        learner, together = self.learner, self.together
        choose = (lambda batch: learner.share(batch.lengths, together(batch))) if learner.num_data_ranks > 1 else None
        self.learner.gather(
            lambda: found.append(self.store.read(index, self.contract, visible_s=self.visible_s, choose=choose))
        )
        batch = found[0]
        if choose is None:
            return batch
        # Effective sample size, quantiles and denominators are made of the numbers of all response tokens.
        numbers: dict[str, Any] = {name: learner.sum_of_shares(getattr(batch, name)) for name in batch.numbers}
        return replace(batch, **numbers)


@dataclass(frozen=True, kw_only=True)
class MiniBatch:
    """What one optimizer step takes."""

    batch: Batch
    """Its samples alone. Tokens of samples that are left out of the loss count as not sampled."""
    advantages: NDArray[np.float32]
    """[responses of the mini-batch]"""
    trained: NDArray[np.bool_] | None
    """[samples of the mini-batch] as MegatronLearner.update takes it."""
    samples: NDArray[np.bool_]
    """[samples of the whole batch] True on those of the mini-batch."""
    responses: NDArray[np.bool_]
    """[responses of the whole batch] True on those of the mini-batch."""
    counts: dict[str, float]
    """How much of it is run through the model, by the names of metrics."""


def mini_batches(computer: AdvantageComputer, batch: Batch, computed: SampleAdvantages, count: int) -> list[MiniBatch]:
    """Split a batch, with the advantages that were `computed` for it, into at most `count` mini-batches.

    Each takes one optimizer step, on whole groups of its own. Advantages, and their normalization over the batch, are
    those of the whole batch; what is averaged or counted in a step (aggregation, the loss's denominator, the ESS) is
    that of its mini-batch. They depend on the batch alone, so every rank makes the same ones and as many.
    """
    parts = []
    if computed.filtered.any():
        kept = batch.loss_mask & ~np.repeat(computed.filtered, batch.response_lengths)
        batch = replace(batch, loss_mask=kept)
    for samples in split_groups(batch.group, computed.in_loss, count):
        part = batch if samples.all() else batch.select(samples)
        through_model = computed.through_model[samples]
        if not through_model.any():  # no sample has an advantage: the step is made of all, since it needs some token
            through_model[:] = True
        updated = part.loss_mask & np.repeat(through_model, part.response_lengths)
        parts.append(
            MiniBatch(
                batch=part,
                advantages=computer.by_token(part, computed.values[samples]).astype(np.float32),
                trained=None if through_model.all() else through_model,
                samples=samples,
                responses=np.repeat(samples, batch.response_lengths),
                counts=dict(
                    num_updated_tokens=float(np.count_nonzero(updated)),
                    num_model_tokens=float(part.lengths[through_model].sum()),
                ),
            )
        )
    return parts


def dealt_together(computer: AdvantageComputer, count: int, batch: Batch) -> list[NDArray[np.bool_]]:
    """Masks [samples] of what is run through the model together: of each mini-batch the samples that are trained on,
    and those that are scored alone; then those that are in no mini-batch. Needs nothing that is counted in tokens."""
    computed = computer.compute_advantages(batch)
    inside = split_groups(batch.group, computed.in_loss, count)
    found = [part & chosen for part in inside for chosen in (computed.through_model, ~computed.through_model)]
    return [*found, ~np.logical_or.reduce(inside)]


def split_groups(group: NDArray[np.int64], in_loss: NDArray[np.bool_], count: int) -> list[NDArray[np.bool_]]:
    """`count` masks [samples] of whole groups, of those `in_loss` [samples], in the order of the batch.

    Their numbers of groups differ by at most one. Fewer groups than `count` get one mask each.
    """
    _, first, member = np.unique(group, return_index=True, return_inverse=True)
    chosen = np.flatnonzero(in_loss[first])
    chosen = chosen[np.argsort(first[chosen])]
    return [np.isin(member, part) for part in np.array_split(chosen, min(count, len(chosen)))]


_OVER_UPDATES: dict[str, Callable[[Sequence[float]], float]] = {
    "lr": itemgetter(-1),
    "gradient_retries": sum,
    "num_tokens": sum,
    "num_updated_tokens": sum,
    "num_model_tokens": sum,
    "ratio_max": max,
    "ratio_max_negative": max,
    "ratio_min": min,
    "sequence_log_ratio_max": max,
    "sequence_log_ratio_min": min,
}
"""How a metric of several updates becomes that of the batch; the mean for all others."""


def merge_updates(parts: Sequence[MiniBatch], updates: Sequence[Update]) -> Update:
    """One Update for the batch. Metrics are means over the updates, but for tokens and retries, which add up, the
    extremes, and the learning rate, which is that of the last.
    Log-probabilities are those before the sample's own update; NaN for samples that no update looked at. Mismatch
    statistics stay apart, by update."""
    if len(updates) == 1 and parts[0].responses.all():
        return updates[0]
    logprobs = updates[0].device_logprobs.new_full((len(parts[0].responses),), np.nan)
    for part, update in zip(parts, updates, strict=True):
        logprobs[torch.from_numpy(part.responses).to(logprobs.device)] = update.device_logprobs
    common = [name for name in updates[0].metrics if all(name in update.metrics for update in updates)]
    values = {name: [update.metrics[name] for update in updates] for name in common}
    measured = [update.mismatch for update in updates if update.mismatch is not None]
    return Update(
        metrics={name: float(_OVER_UPDATES.get(name, np.mean)(each)) for name, each in values.items()},
        histogram=np.sum([update.histogram for update in updates], axis=0).tolist(),
        device_logprobs=logprobs,
        mismatch=Mismatch.stack(measured, [part.samples for part in parts]) if measured else None,
    )


def describe(batch: Batch, step: int, solved_at: float = SOLVED_REWARD) -> dict[str, Any]:
    """Return reward, staleness in versions, lengths, failed verifiers, samples that an engine repeated; means of the
    parts of the reward, over the samples that have them; of each source, where the task has several, its share of the
    samples, and reward and solve rate where it has a reward; of a teacher the distance and the samples that it did not
    score."""
    lag = step - batch.policy_version
    judged = batch.judged
    told = {name: part for name, part in batch.reward_parts.items() if name not in OWN_PARTS}
    parts = {name: _mean(part[~np.isnan(part)]) for name, part in told.items()}
    teacher = {}
    if batch.teacher_logprobs is not None:
        teacher = dict(reverse_kl=mean_reverse_kl(batch), teacher_failures=float((~taught(batch)).sum()))
    sources = {}
    for name, problems in batch.sources.items():
        of_source = (batch.problem >= problems.start) & (batch.problem < problems.stop)
        sources[name] = dict(share=_mean(of_source))
        if (of_source & judged).any():
            rewards = batch.reward[of_source & judged]
            sources[name] |= dict(reward_mean=_mean(rewards), solve_rate=_mean(is_solved(rewards, solved_at)))
    return dict(
        reward_mean=_mean(batch.reward[judged]),
        solve_rate=_mean(is_solved(batch.reward[judged], solved_at)),
        lag_mean=float(lag.mean()),
        lag_max=float(lag.max()),
        truncated_share=float(batch.truncated.mean()),
        response_tokens_mean=float(batch.response_lengths.mean()),
        prompt_tokens_mean=float(batch.prompt_lengths.mean()),
        verifier_failures=float((~judged).sum()),
        repeated_samples=float(batch.repeated),
        **({"reward_parts": parts} if parts else {}),
        **({"sources": sources} if sources else {}),
        **teacher,
    )


def asked_solve_rate(batch: Batch, solved_at: float = SOLVED_REWARD) -> float:
    """Share of solved samples among all that were sampled and judged for the batch, those of dropped groups included:
    dynamic sampling keeps only groups of mixed outcome, whose rate says little about the policy's."""
    judged = batch.judged
    samples = int(judged.sum()) + sum(group.samples for group in batch.dropped)
    solved = int(is_solved(batch.reward[judged], solved_at).sum()) + sum(group.solved for group in batch.dropped)
    return solved / samples if samples else 0.0


def _mean(values: NDArray[Any]) -> float:
    """0 where there is none."""
    return float(values.mean()) if len(values) else 0.0

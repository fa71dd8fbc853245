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
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from pipeline.advantages.compute import AdvantageComputer, SampleAdvantages, mean_reverse_kl, taught
from pipeline.background import ANSWER_S, Patience, Say, print_notice
from pipeline.data.batch import OWN_PARTS, SOLVED_REWARD, Batch, LogprobContract, is_solved
from pipeline.data.files import FIRST_POLL_S, VISIBLE_S, fsync_directory, slower
from pipeline.data.run_directory import RunDirectory
from pipeline.data.store import BatchStore
from pipeline.errors import DeadlineExceededError, StoppedError
from pipeline.ports.learner import Learner, Update
from precision.mismatch.statistics import Mismatch
from precision.torch_on_use import Tensor, torch

STOP_FILE_VARIABLE = "EVENKEEL_STOP_FILE"
"""Names a local file: once it is there, training ends in order."""

Answer = Literal["there", "lost", "not yet", "stop"]


def stop_file_exists() -> bool:
    """Whether the process that started this one has asked it to end."""
    name = os.environ.get(STOP_FILE_VARIABLE)
    return name is not None and Path(name).exists()


def waiting_for_batches(say: Say) -> Patience:
    """What says so when a batch does not come for long."""
    return Patience(say, "the learner", "the collector's commit (its log is in RUN/logs)")


@dataclass(frozen=True, kw_only=True)
class BatchSource:
    """The committed batches of `store`, for the learner of `run`. Every method is collective."""

    run: RunDirectory
    store: BatchStore
    learner: Learner
    contract: LogprobContract
    wait_deadline_s: float
    """Longest wait for a batch while the collector commits and evaluates nothing."""
    together: Callable[[Batch], Sequence[NDArray[np.bool_]]] = lambda batch: [np.ones(batch.num_samples, np.bool_)]
    """Masks [samples] of what is run through the model together, from what is counted in samples
    (pipeline.trainer.batches.dealt_together): each is dealt out evenly over the ranks."""
    stop_requested: Callable[[], bool] = stop_file_exists
    """Asked on rank 0 alone."""
    visible_s: float = VISIBLE_S
    patience: Patience = field(default_factory=lambda: waiting_for_batches(print_notice))
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
        watch = _Watch(self, index)
        while (answer := self.learner.tell(watch.look)) == "not yet":
            meanwhile()
        if answer == "stop":
            raise StoppedError(f"asked to end before batch {index}; start the run again to go on")
        if answer == "lost":
            return None
        found: list[Batch] = []
        learner, together = self.learner, self.together
        choose = (lambda batch: learner.share(batch.lengths, together(batch))) if learner.num_data_ranks > 1 else None
        self.learner.everywhere(
            lambda: found.append(self.store.read(index, self.contract, visible_s=self.visible_s, choose=choose))
        )
        # Effective sample size, quantiles and denominators are made of the numbers of all response tokens.
        return found[0] if choose is None else found[0].with_numbers(self.learner.sum_of_shares)


class _Watch:
    """Rank 0's view of one wait; the other ranks make one too, and look at nothing."""

    def __init__(self, source: BatchSource, index: int) -> None:
        self._source = source
        self._index = index
        self._pause_s = FIRST_POLL_S
        self._seen: tuple[int, int] | None = None
        self._deadline = time.monotonic() + source.wait_deadline_s

    def look(self) -> Answer:
        """Look for some seconds. Raises DeadlineExceededError once the collector has stood still for too long."""
        source, ends = self._source, time.monotonic() + ANSWER_S
        source.run.fence()
        self._seen = self._seen or self._progress()
        while True:
            if source.stop_requested():
                return "stop"
            if self._index in source.store.settled():
                # Whoever made it may not have come to that: what is trained on must not be gone after a power cut.
                fsync_directory(source.store.directory)
                source.patience.progress()
                return "there" if source.store.lost(self._index) is None else "lost"
            source.patience.still(f"batch {self._index}")
            if time.monotonic() >= self._deadline:
                before, self._seen = self._seen, self._progress()
                if self._seen == before:
                    raise DeadlineExceededError(
                        f"waited {source.wait_deadline_s:g} s for batch {self._index} in {source.store.directory}, and "
                        "none was committed nor a version evaluated; look at the collector's log"
                    )
                self._deadline = time.monotonic() + source.wait_deadline_s
            if time.monotonic() >= ends:
                return "not yet"
            time.sleep(self._pause_s)
            self._pause_s = slower(self._pause_s)

    def _progress(self) -> tuple[int, int]:
        """Changes while the collector gets on: it commits, and it evaluates before it commits."""
        return len(self._source.store.committed()), len(self._source.run.evaluated_versions())


@dataclass(frozen=True, kw_only=True)
class MiniBatch:
    """What one optimizer step takes."""

    batch: Batch
    """Its samples alone. Tokens of samples that are left out of the loss count as not sampled."""
    advantages: NDArray[np.float32]
    """[responses of the mini-batch]"""
    trained: NDArray[np.bool_] | None
    """[samples of the mini-batch] as Learner.update takes it."""
    samples: NDArray[np.bool_]
    """[samples of the whole batch] True on those of the mini-batch."""
    responses: NDArray[np.bool_]
    """[responses of the whole batch] True on those of the mini-batch."""
    counts: dict[str, float]
    """How much of it is run through the model, by the names of metrics."""

    def on_device(self, values: Tensor) -> Tensor:
        """bool [responses of the whole batch] `responses`, where `values` are."""
        return torch.from_numpy(self.responses).to(values.device)


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
        logprobs[part.on_device(logprobs)] = update.device_logprobs
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
    """Reward, staleness in versions, lengths, failed verifiers, samples that an engine repeated; means of the parts of
    the reward, over the samples that have them; share, reward and solve rate of each source, where the task has
    several; of a teacher the distance and the samples that it did not score."""
    lag = step - batch.policy_version
    judged = batch.judged
    told = {name: part for name, part in batch.reward_parts.items() if name not in OWN_PARTS}
    parts = {name: _mean(part[~np.isnan(part)]) for name, part in told.items()}
    teacher = {}
    if batch.teacher_logprobs is not None:
        teacher = dict(reverse_kl=mean_reverse_kl(batch), teacher_failures=float((~taught(batch)).sum()))
    sources = {name: _of_source(batch, judged, problems, solved_at) for name, problems in batch.sources.items()}
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


def _of_source(batch: Batch, judged: NDArray[np.bool_], problems: range, solved_at: float) -> dict[str, float]:
    """`share` of the samples; the other two only where a sample of the source has a reward."""
    own = (batch.problem >= problems.start) & (batch.problem < problems.stop)
    found = dict(share=_mean(own))
    if (own & judged).any():
        rewards = batch.reward[own & judged]
        found |= dict(reward_mean=_mean(rewards), solve_rate=_mean(is_solved(rewards, solved_at)))
    return found


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

"""Wait for batches on rank 0, read each rank's share, split a batch into mini-batches and merge their updates.

rank 0   looks for the batch every second ──"not yet" every few seconds, then "there"──▶ every rank opens the file
                    ▲                                                                        │ reads the per-sample
               stop requested? superseded? ── either ends the wait on every rank             │ arrays, deals, reads its
                                                                                             ▼ tokens
values per response token (9 bytes each) of all samples ◀──exchanged, bit for bit─────── its share
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
from pipeline.data.batch import (
    ENVIRONMENT_FAILED,
    OWN_PARTS,
    SOLVED_REWARD,
    Batch,
    LogprobContract,
    StopReason,
    is_solved,
)
from pipeline.data.files import FIRST_POLL_S, VISIBLE_S, fsync_directory, slower
from pipeline.data.run_directory import RunDirectory
from pipeline.data.store import BatchStore, LostBatch
from pipeline.errors import DeadlineExceededError, StoppedError
from pipeline.ports.learner import Update
from precision.mismatch.statistics import Mismatch
from precision.torch_on_use import torch

if TYPE_CHECKING:
    from megatron_bridge.learner import MegatronLearner

STOP_FILE_VARIABLE = "EVENKEEL_STOP_FILE"
"""The variable that names a local file: once the file exists, training stops in order."""

Answer = Literal["there", "lost", "not yet", "stop"]


WAITS = ("the learner", "the collector's commit (its log is in RUN/logs)")
"""Arguments of Patience: the waiting process, and the event that would end its wait."""


@dataclass(frozen=True, kw_only=True)
class BatchSource:
    """The committed batches of `store`, for the learner of `run`. Every method is collective."""

    run: RunDirectory
    store: BatchStore
    learner: MegatronLearner
    contract: LogprobContract
    wait_deadline_s: float
    """Longest wait for a batch while the collector neither commits nor evaluates."""
    together: Callable[[Batch], Sequence[NDArray[np.bool_]]] = lambda batch: [np.ones(batch.num_samples, np.bool_)]
    """Returns masks [samples] of the samples that run through the model together, from per-sample arrays alone
    (`dealt_together`): each mask is dealt out evenly over the ranks."""
    stop_requested: Callable[[], bool] = lambda: (
        STOP_FILE_VARIABLE in os.environ and Path(os.environ[STOP_FILE_VARIABLE]).exists()
    )
    """Whether the parent process has asked this process to stop. Called only on rank 0."""
    visible_s: float = VISIBLE_S
    patience: Patience = field(default_factory=lambda: Patience(print_notice, *WAITS))
    """Rank 0's reporter of long waits."""

    def is_there(self, index: int) -> bool:
        """Return whether `wait` for the batch would return at once."""
        return self.learner.tell(lambda: self.store.is_settled(index))

    def wait(self, index: int, meanwhile: Callable[[], None] = lambda: None) -> Batch | None:
        """Return batch `index` once it is committed, or None if it was lost by damage. With several ranks, each holds
        its share. Every few seconds of waiting `meanwhile` is called on every rank. Raises on every rank StoppedError
        after a stop request, DeadlineExceededError, SupersededError, and the errors of BatchStore.read."""
        deadline, pause_s = time.monotonic() + self.wait_deadline_s, FIRST_POLL_S
        seen: tuple[int, int] | None = None
        """Times that change while the collector makes progress."""

        def look() -> Answer:
            """Look for the batch for some seconds, on rank 0."""
            nonlocal deadline, pause_s, seen
            ends = time.monotonic() + ANSWER_S
            self.run.fence()
            seen = seen or self.run.sampled_at_ns()
            while True:
                if self.stop_requested():
                    return "stop"
                if self.store.is_settled(index):
                    # The collector may not have synced the folder yet, and a trained batch must survive a power cut.
                    fsync_directory(self.store.directory)
                    self.patience.progress()
                    return "lost" if isinstance(self.store.gone(index), LostBatch) else "there"
                self.patience.still(f"batch {index}")
                if time.monotonic() >= deadline:
                    before, seen = seen, self.run.sampled_at_ns()
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
        # Effective sample size, quantiles and denominators need the values of all response tokens.
        numbers: dict[str, Any] = {name: learner.sum_of_shares(getattr(batch, name)) for name in batch.numbers}
        return replace(batch, **numbers)


@dataclass(frozen=True, kw_only=True)
class MiniBatch:
    """The input of one optimizer step."""

    batch: Batch
    """The mini-batch's samples. Tokens of samples left out of the loss count as not sampled."""
    advantages: NDArray[np.float32]
    """[responses of the mini-batch]"""
    trained: NDArray[np.bool_] | None
    """[samples of the mini-batch] the argument of MegatronLearner.update."""
    episodes: NDArray[np.bool_]
    """[episodes of the whole batch] True for the mini-batch's episodes."""
    responses: NDArray[np.bool_]
    """[responses of the whole batch] True for the mini-batch's tokens."""
    counts: dict[str, float]
    """Numbers of tokens that are updated and that run through the model, by metric name."""


def mini_batches(computer: AdvantageComputer, batch: Batch, computed: SampleAdvantages, count: int) -> list[MiniBatch]:
    """Split a batch, with the advantages `computed` for it, into at most `count` mini-batches. Each mini-batch takes
    one optimizer step on whole groups of its own. Advantages and their normalization are the whole batch's; the step's
    averages and counts (aggregation, the loss's denominator, the ESS) are the mini-batch's. The split depends on the
    batch alone, so it is the same on every rank."""
    parts = []
    if computed.filtered.any():
        kept = batch.loss_mask & ~np.repeat(computed.filtered, batch.response_lengths)
        batch = replace(batch, loss_mask=kept)
    for samples in split_groups(batch.group, computed.in_loss, count):
        part = batch if samples.all() else batch.select(samples)
        through_model = computed.through_model[samples]
        if not through_model.any():  # no sample has an advantage: use all, because a step needs some token
            through_model[:] = True
        updated = part.loss_mask & np.repeat(through_model, part.response_lengths)
        parts.append(
            MiniBatch(
                batch=part,
                advantages=computer.by_token(part, computed.values[samples]).astype(np.float32),
                trained=None if through_model.all() else through_model,
                episodes=samples[batch.first_rows],
                responses=np.repeat(samples, batch.response_lengths),
                counts=dict(
                    num_updated_tokens=float(np.count_nonzero(updated)),
                    num_model_tokens=float(part.lengths[through_model].sum()),
                ),
            )
        )
    return parts


def dealt_together(computer: AdvantageComputer, count: int, batch: Batch) -> list[NDArray[np.bool_]]:
    """Return masks [samples] of samples that run through the model together: for each mini-batch those that are trained
    on and those that are only scored, then those in no mini-batch. Needs no per-token array."""
    computed = computer.compute_advantages(batch)
    inside = split_groups(batch.group, computed.in_loss, count)
    found = [part & chosen for part in inside for chosen in (computed.through_model, ~computed.through_model)]
    return [*found, ~np.logical_or.reduce(inside)]


def split_groups(group: NDArray[np.int64], in_loss: NDArray[np.bool_], count: int) -> list[NDArray[np.bool_]]:
    """Return `count` masks [samples] of whole groups, of the samples `in_loss` [samples], in the order of the batch.
    Their numbers of groups differ by at most 1. Fewer groups than `count` get one mask each."""
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
"""The rule by which a metric of several updates becomes the batch's; other metrics are averaged."""


def merge_updates(parts: Sequence[MiniBatch], updates: Sequence[Update]) -> Update:
    """Merge the updates into one Update for the batch. Metrics are means over the updates, except sums of tokens and
    retries, extremes, and the last learning rate. Log-probabilities are those before the sample's own update, NaN for
    samples in no update. Mismatch statistics stay apart, by update."""
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
        mismatch=Mismatch.stack(measured, [part.episodes for part in parts]) if measured else None,
    )


def describe(batch: Batch, step: int, solved_at: float = SOLVED_REWARD) -> dict[str, Any]:
    """Return the batch's metrics: reward, staleness in versions, lengths, failed verifiers, repeated samples, bias; the
    mean of each reward part; for a task with several sources, each source's share, reward and solve rate; for a
    teacher, the distance and the samples that it did not score. An episode of several turns counts as one sample, with
    its sampled tokens as its response; `episodes` then has their means, and the share of each reason why they stopped.
    """
    lag, first = (step - batch.policy_version)[batch.own_tokens], batch.first_rows
    judged, reward, problem = batch.judged[first], batch.reward[first], batch.problem[first]
    parts = {}
    for name, part in batch.reward_parts.items():
        if name not in OWN_PARTS:
            parts[name] = _mean(part[first][~np.isnan(part[first])])
    teacher = {}
    if batch.teacher_logprobs is not None:
        teacher = dict(reverse_kl=mean_reverse_kl(batch), teacher_failures=float((~taught(batch)[first]).sum()))
    sources = {}
    for name, problems in batch.sources.items():
        of_source = (problem >= problems.start) & (problem < problems.stop)
        sources[name] = dict(share=_mean(of_source))
        if (of_source & judged).any():
            rewards = reward[of_source & judged]
            sources[name] |= dict(reward_mean=_mean(rewards), solve_rate=_mean(is_solved(rewards, solved_at)))
    environment_failures = float(
        np.nansum(batch.reward_parts.get(ENVIRONMENT_FAILED, np.zeros(batch.num_samples))[first])
    )
    episodes: dict[str, Any] = {}
    if (of := batch.episodes) is not None:
        reasons = np.bincount(of.stopped[first], minlength=len(StopReason)) / max(1, batch.num_episodes)
        episodes = dict(
            turns_mean=float(of.turns.sum() / max(1, batch.num_episodes)),
            rows_mean=batch.num_samples / max(1, batch.num_episodes),
            tool_calls_mean=_mean(of.tool_calls[first]),
            tool_s_mean=_mean(of.tool_s[first]),
            failures=environment_failures,
            given_up=float(sum(drop.kind == "failed" for drop in batch.dropped)),
            stopped={reason.name.lower(): float(reasons[reason]) for reason in StopReason},
        )
    return dict(
        reward_mean=_mean(reward[judged]),
        solve_rate=_mean(is_solved(reward[judged], solved_at)),
        lag_mean=float(lag.mean()),
        lag_max=float(lag.max()),
        truncated_share=float(batch.truncated[first].mean()),
        response_tokens_mean=float(batch.answer_lengths.mean()),
        prompt_tokens_mean=float(batch.prompt_lengths[first].mean()),
        verifier_failures=float((~judged).sum()) - environment_failures,
        repeated_samples=float(batch.repeated),
        **batch.bias,
        **({"reward_parts": parts} if parts else {}),
        **({"sources": sources} if sources else {}),
        **({"episodes": episodes} if episodes else {}),
        **teacher,
    )


def asked_solve_rate(batch: Batch, solved_at: float = SOLVED_REWARD) -> float:
    """Return the share of solved samples among all judged ones, dropped groups included: dynamic sampling keeps only
    groups of mixed outcome, whose rate says little about the policy's."""
    judged, reward = batch.judged[batch.first_rows], batch.reward[batch.first_rows]
    samples, solved = int(judged.sum()), int(is_solved(reward[judged], solved_at).sum())
    for group in batch.dropped:
        samples += group.samples
        solved += group.solved
    return solved / samples if samples else 0.0


def _mean(values: NDArray[Any]) -> float:
    """Return the mean, or 0 without values."""
    return float(values.mean()) if len(values) else 0.0

"""What a batch itself says, for the step's line of metrics. A sample whose verifier failed has no reward to count."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline.advantages.distillation import mean_reverse_kl, taught
from pipeline.data.batch import OWN_PARTS, SOLVED_REWARD, Batch, is_solved


def describe(batch: Batch, step: int, solved_at: float = SOLVED_REWARD) -> dict[str, Any]:
    """Reward, staleness in versions, lengths, failed verifiers, samples that an engine repeated; means of the parts of
    the reward, over the samples that have them; share, reward and solve rate of each source, where the task has
    several; of a teacher the distance and the samples that it did not score."""
    lag = step - batch.policy_version
    judged = batch.judged
    told = {name: part for name, part in batch.reward_parts.items() if name not in OWN_PARTS}
    parts = {name: _mean(part[~np.isnan(part)]) for name, part in told.items()}
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
        **_of_teacher(batch),
    )


def _of_teacher(batch: Batch) -> dict[str, float]:
    """Nothing where the recipe has none."""
    if batch.teacher_logprobs is None:
        return {}
    return dict(reverse_kl=mean_reverse_kl(batch), teacher_failures=float((~taught(batch)).sum()))


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

"""The mismatch statistics of an optimizer step, from what its passes gathered.

Every rank has the log-probabilities of all tokens (passes.Gathered). A large step is measured in chunks, of which each
rank takes its share, whatever its place in the layout; the statistics are the same on every rank and in every layout.
"""

from __future__ import annotations

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from megatron_bridge.step.passes import Gathered
from megatron_bridge.step.response_tokens import by_token
from pipeline.data.batch import Batch
from precision.mismatch.statistics import ALONE, Mismatch, Ranks, StepTokens


class MismatchMeter:
    """Called once an optimizer step. It remembers the last one: in the second update on a batch the policy is no longer
    of the version that the batch is counted by, so all its tokens count as one version older."""

    def __init__(self) -> None:
        self._last: tuple[int, int] | None = None
        """Batch and step of the last call."""

    def __call__(
        self, gathered: Gathered, batch: Batch, advantages: NDArray[np.float32], seen: Tensor, *, step: int
    ) -> Mismatch:
        """Statistics of the tokens that are `seen`, bool [responses] on the device. `advantages` is [samples] or
        [responses], `step` the number of optimizer steps taken before this one.

        Raises FloatingPointError on an unusable log-ratio, ValueError when no token is seen.
        """
        device, later_update = gathered.logprobs.device, self._last == (batch.index, step - 1)
        self._last = (batch.index, step)

        def tensor(values: NDArray[np.generic]) -> Tensor:
            return torch.from_numpy(values).to(device)

        return Mismatch.of_step(
            StepTokens(
                learner_logprobs=gathered.logprobs,
                rollout_logprobs=tensor(batch.rollout_logprobs),
                seen=seen,
                advantages=tensor(by_token(batch, advantages)),
                entropy=gathered.entropy,
                age=tensor(batch.index + int(later_update) - batch.policy_version),
                offsets=tensor(batch.response_offsets),
            ),
            all_ranks(),
        )


def all_ranks() -> Ranks:
    """Those of the default process group; this process alone where there is none."""
    if not dist.is_initialized():
        return ALONE
    return Ranks(rank=dist.get_rank(), size=dist.get_world_size(), sum=_sum)


def _sum(values: Tensor) -> Tensor:
    dist.all_reduce(values)
    return values

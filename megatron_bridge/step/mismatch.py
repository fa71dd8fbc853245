"""The mismatch statistics of an optimizer step, from what its passes gathered.

Every rank has the log-probabilities of all tokens (passes.Gathered), and computes all statistics, on its device: they
are the same on every rank and in every layout, and cost no communication.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megatron_bridge.step.passes import Gathered
from pipeline.data.records import Batch
from precision.mismatch.statistics import Mismatch, StepTokens


def measure_mismatch(gathered: Gathered, batch: Batch, advantages: NDArray[np.float32], seen: Tensor) -> Mismatch:
    """Of the tokens that are `seen`, bool [responses] on the host; `advantages` is [responses].

    Raises FloatingPointError on an unusable log-ratio, ValueError when no token is seen.
    """
    device = gathered.logprobs.device

    def tensor(values: NDArray[np.generic]) -> Tensor:
        return torch.from_numpy(values).to(device)

    return Mismatch.of_step(
        StepTokens(
            learner_logprobs=gathered.logprobs,
            rollout_logprobs=tensor(batch.rollout_logprobs),
            seen=seen.to(device),
            advantages=tensor(advantages),
            entropy=gathered.entropy,
            age=tensor(batch.index - batch.policy_version),
            offsets=tensor(batch.response_offsets),
        )
    )

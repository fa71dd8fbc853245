"""Carry what an optimizer step measured from the learner (megatron_bridge.learner) to the loop and its readers."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from pipeline.data.batch import Batch
from precision.mismatch.statistics import Mismatch
from precision.torch_on_use import Tensor


@dataclass(frozen=True, kw_only=True)
class Update:
    """What an optimizer step measured, or all those of a batch; the same on every rank."""

    metrics: dict[str, float]
    """loss, grad_norm, lr, entropy, num_tokens, padding_share, the objective's sums as means, mismatch statistics."""
    histogram: list[float]
    """Tokens counted by log-ratio, in the bins of precision.ratios."""
    device_logprobs: Tensor = field(repr=False)
    """float32 [responses] the learner's log-probabilities at the weights before the step that trained on them, in the
    batch's order, on the learner's device; NaN where no step looked."""
    mismatch: Mismatch | None = field(default=None, repr=False)
    """Learner against engine, in all detail; None from a learner that does not measure it."""

    @cached_property
    def logprobs(self) -> NDArray[np.float32]:
        """[responses] `device_logprobs` on the host. To ask for them copies them, once: let rank 0 alone ask, which
        writes them."""
        found: NDArray[np.float32] = self.device_logprobs.cpu().numpy()
        return found


def looked_at(batch: Batch, learner_logprobs: NDArray[np.float32]) -> NDArray[np.bool_]:
    """bool [responses]: the tokens that an engine sampled and the learner has a log-probability of, be it infinite.
    `learner_logprobs` is [responses], natural log."""
    return np.asarray(batch.loss_mask & ~np.isnan(learner_logprobs))

"""What replaying the engine's experts changes: some samples of a batch, scored with the learner's own experts too.

    before the step: a share of the samples ──learner's own experts──▶ log-probabilities ─┐
    the step itself: all samples ───────────the engine's experts────▶ log-probabilities ─┴▶ ESS, k3 of the same tokens

Both are at the weights before the step, so the difference is that of routing alone.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline.data.batch import Batch
from pipeline.ports.learner import Learner
from precision.ratios import RatioSums
from precision.torch_on_use import Tensor, torch

SHARE, LEAST = 16, 16
"""One sample in SHARE is scored twice, and at least LEAST of them: a forward pass over 1/16 of the tokens is about 2 %
of a training pass over all."""

MEASURED = ("ess", "k3_kl", "log_ratio_abs_mean")


@dataclass(frozen=True, kw_only=True)
class ReplayEffect:
    """The samples of one batch that were scored with the learner's own experts."""

    samples: NDArray[np.bool_]
    """[samples of the batch]"""
    part: Batch
    """These alone."""
    own: Tensor
    """float32 [responses of the part] log-probabilities with the learner's own experts, at the weights before the step,
    on the learner's device."""

    @staticmethod
    def before_step(learner: Learner, batch: Batch) -> ReplayEffect | None:
        """Score some samples; None for a batch without recorded experts. Collective."""
        if batch.experts is None:
            return None
        samples = spread_samples(batch.num_samples)
        part = batch.select(samples)
        return ReplayEffect(samples=samples, part=part, own=learner.score(replace(part, experts=None)))

    def measured(self, batch: Batch, logprobs: Tensor) -> dict[str, float]:
        """Metrics of the tokens that the step looked at: those of MEASURED, each `_with_replay` and `_without_replay`.

        `logprobs` [responses of the batch] are the step's own, NaN where it did not look; on the learner's device.
        """

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


def spread_samples(count: int) -> NDArray[np.bool_]:
    """[count] True on one in SHARE, at least LEAST, evenly spread: neighbors answer one prompt."""
    wanted = min(count, max(LEAST, -(-count // SHARE)))
    chosen = np.zeros(count, np.bool_)
    chosen[np.linspace(0, count - 1, wanted).astype(np.int64)] = True
    return chosen

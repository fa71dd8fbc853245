"""The factor on the learning rate of each optimizer step: the recipe's (learner.optimizer.lr_by_lag), or the ESS
controller's where that is less."""

from __future__ import annotations

from dataclasses import dataclass

from pipeline.control.loop import StepController, mean_age
from pipeline.data.batch import Batch
from pipeline.errors import NonFiniteError
from precision.ess import staleness_ess
from precision.step_size import LrByLag, lr_factor, lr_factor_of_ess
from precision.torch_on_use import Tensor, torch


@dataclass(frozen=True, kw_only=True)
class StepSize:
    """The same on every rank: what it depends on is."""

    lr_by_lag: LrByLag = "none"
    updates_per_batch: int = 1
    controller: StepController | None = None

    def of_batch(self, batch: Batch) -> float:
        """What every step on the batch has in common: the factor by its age, and the controller's."""
        by_age = lr_factor(mean_age(batch, self.updates_per_batch)) if self.lr_by_lag == "sqrt" else 1.0
        return by_age if self.controller is None else min(by_age, self.controller.lr_factor(batch))

    def measured(
        self, of_batch: float, part: Batch, scored: Tensor | None, old_logprobs: Tensor | None
    ) -> dict[str, float]:
        """`lr_factor` of the step on `part` of a batch, and `staleness_ess` where that decides.

        `scored` and `old_logprobs` [responses of the part] are the learner's, at the present weights and at the version
        that sampled; None for the latter where both are the same. Raises NonFiniteError on a log-probability that is
        not finite.
        """
        if self.lr_by_lag != "ess":
            return dict(lr_factor=of_batch)
        ess = 1.0 if old_logprobs is None else _staleness_ess(part, scored, old_logprobs)
        return dict(lr_factor=min(of_batch, lr_factor_of_ess(ess)), staleness_ess=ess)


def _staleness_ess(batch: Batch, scored: Tensor | None, old_logprobs: Tensor) -> float:
    assert scored is not None  # Scoring.sizes_steps
    sampled = torch.from_numpy(batch.loss_mask).to(scored.device)
    rollout = torch.from_numpy(batch.rollout_logprobs).to(scored.device)[sampled].double()
    old = old_logprobs.to(scored.device)[sampled].double()
    try:
        return staleness_ess(old - rollout, scored[sampled].double() - old)
    except FloatingPointError as error:
        raise NonFiniteError(f"batch {batch.index}: {error}") from error

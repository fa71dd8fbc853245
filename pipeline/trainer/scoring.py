"""How often a batch is scored: passes without gradients over all of it, before the learner has learned from it.

beforehand    log-probabilities of an older policy than that of the step, by pipeline.trainer.old_logprobs
of the step   those just before an optimizer step, of what it is taken on
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Scoring:
    """What is read of a batch's scores."""

    prepares: bool
    """Whether the objective is prepared from what it is trained on, scored (Objective.needs_scoring)."""
    reads_step: bool
    """Whether that needs the log-probabilities just before the step where older ones are known."""
    reads_old: bool
    """Whether anything divides by pi_old."""
    sizes_steps: bool = False
    """Whether the size of a step follows from how far the policy has moved since pi_old."""

    def of_step(self, *, old_known: bool) -> bool:
        """Whether an optimizer step is scored. `old_known`: pi_old is another policy, and scored beforehand."""
        if not old_known:
            return self.prepares
        return self.sizes_steps or (self.prepares and self.reads_step)

    def passes(self, *, older: bool) -> int:
        """Over a batch of which pi_old is `older` than its first step, or than one of its later ones."""
        beforehand = self.reads_old and older
        return beforehand + self.of_step(old_known=beforehand)

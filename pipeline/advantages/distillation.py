"""On-policy distillation: every token that the student sampled is judged by how likely a teacher finds it.

    A_t = reward_coefficient A_i + coefficient (log pi_teacher(y_t) - log pi_b(y_t))

A_i is the advantage of the sample's reward, pi_b the distribution that the engine sampled the token from. The second
term is minus the reverse KL of the token, estimated on the token itself (Thinking Machines, "On-Policy Distillation",
2025: "reverse KL" as the advantage, of every token alone, with no discount over later ones; slime's `--opd-kl-coef`).
In expectation over the policy's own samples, its gradient is that of - coefficient KL(pi || pi_teacher), given the
tokens before.

The advantage stays as it is while the learner moves away from pi_b, by staleness or by several updates a batch. An
objective that weighs by pi / pi_b then follows - KL(pi || pi_teacher) + KL(pi || pi_b): the same way, but further.

Temperatures: pi_b is softmax(logits / rollout.temperature), as stored. pi_teacher is softmax(logits) of the teacher, at
temperature 1, since servers do not scale the log-probabilities of tokens that they are given. What becomes equal to the
teacher is the student as it is sampled. So the learner must train that same distribution, and nothing may cut it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Self

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, PositiveInt, model_validator

from pipeline.config.section import ServerUrls
from pipeline.data.batch import TEACHER_FAILED, Batch
from pipeline.errors import StoreError
from precision.settings import Settings


class Distillation(Settings):
    """Who teaches, and how much it counts."""

    path: Path | None = Field(
        None,
        description="HF folder of the teacher, with the student's tokenizer: a server is started beside the collector.",
    )
    urls: ServerUrls = Field(
        (), description="SGLang servers of the teacher that exist already: http://HOST:PORT of each; instead of path."
    )
    coefficient: float = Field(1.0, gt=0.0, description="Of the reverse KL of a token, in its advantage.")
    reward_coefficient: float = Field(
        0.0, ge=0.0, description="Of the advantage that comes from the rewards; 0: the teacher alone."
    )
    tensor_parallel: PositiveInt = Field(1, description="GPUs of the server that is started.")
    extra_args: tuple[str, ...] = Field(
        (), description="Passed to the SGLang that is started, as they are; none that another key says."
    )

    @model_validator(mode="after")
    def _one_teacher(self) -> Self:
        if (self.path is None) == (not self.urls):
            found = "neither path nor urls is" if self.path is None else "both path and urls are"
            raise ValueError(f"{found} given, expected one of them; set distillation.path, or distillation.urls")
        return self

    @property
    def judges_alone(self) -> bool:
        """Whether rewards count for nothing, so that no samples of a prompt are compared."""
        return self.reward_coefficient == 0.0

    def added(self, step: Batch) -> NDArray[np.float64]:
        """[responses] what the teacher adds to the advantage of each token; 0 where no engine sampled. Raises
        StoreError for a batch without the teacher's log-probabilities."""
        return -self.coefficient * reverse_kl(step)


def reverse_kl(batch: Batch) -> NDArray[np.float64]:
    """[responses] log pi_b - log pi_teacher, nats; 0 where no engine sampled. Raises StoreError as `added`."""
    if batch.teacher_logprobs is None:
        raise StoreError(
            f"batch {batch.index} has no log-probabilities of a teacher: it was collected without the recipe's section "
            "distillation; begin another run.name"
        )
    difference = batch.rollout_logprobs.astype(np.float64) - batch.teacher_logprobs
    return np.where(batch.loss_mask, difference, 0.0)


def taught(batch: Batch) -> NDArray[np.bool_]:
    """[samples] False where the teacher of a distillation did not score the sample."""
    failed = batch.reward_parts.get(TEACHER_FAILED)
    return np.ones(batch.num_samples, np.bool_) if failed is None else np.isnan(failed) | (failed == 0.0)


def mean_reverse_kl(batch: Batch) -> float:
    """Nats a sampled token: the estimate of KL(pi_b || teacher) from the tokens themselves, of either sign."""
    return float(reverse_kl(batch).sum()) / max(1, batch.num_sampled_tokens)

"""What every objective takes and returns.

An objective is one class in one file. Its fields are the keys of a recipe's `objective` section; its methods are the
mathematics; what it says about itself (`Facts`) is what recipes, planner and reports need to know of it.

`loss` takes the tensors of one micro-batch and returns one scalar. It knows no rank, file or engine. Because the
denominator is passed in, losses of micro-batches and ranks simply add up.

What concerns whole responses or the whole step (effective sample size, vetoes, sequence ratios) cannot be seen from a
micro-batch. An objective that needs it has the step scored first, without gradients, and decides in `prepare`, once,
on flat tensors that are the same on every rank: so neither layout nor micro-batch size can change the decision. One
whose `loss` looks at its micro-batch as a whole says so (`Facts.depends_on_micro_batches`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from precision.ratios import masked_log_ratios, rows
from precision.settings import Settings
from precision.torch_on_use import Tensor, torch

Aggregation = Literal["token", "sequence", "prompt", "constant"]
"""What counts alike in the mean of a loss; see `pipeline.advantages.compute`."""


@dataclass(frozen=True, kw_only=True)
class TokenBatch:
    """Response tokens of one micro-batch. All fields [batch, sequence]; where `mask` is False a field may hold
    anything (NaN, -inf, -120) without touching loss or gradient."""

    rollout_logprobs: Tensor
    """float32, natural log, of the engine that sampled."""
    advantages: Tensor
    """float32; for objectives with `Facts.needs_scoring`, those of `Prepared`."""
    mask: Tensor
    """bool, True on response tokens that were sampled."""
    anchor_logprobs: Tensor | None = None
    """float32, `Prepared.anchor_logprobs`; None for objectives that prepare none."""
    reference_logprobs: Tensor | None = None
    """float32, of the reference policy; None where there is none (precision.reference)."""


@dataclass(frozen=True, kw_only=True)
class StepContext:
    """What a micro-batch cannot know by itself."""

    num_tokens: int
    """Sampled response tokens of the whole optimizer step, over all micro-batches and ranks: the loss denominator."""
    step_ess: float | None = None
    """`Prepared.step_ess`."""
    sum_over_ranks: Callable[[Tensor], Tensor] = lambda sums: sums
    """All-reduces a float64 vector over data and context parallel ranks (identity in one process)."""


def response_values(values: Tensor, mask: Tensor, name: str) -> Tensor:
    """`values` [batch, sequence] with 0 where `mask` is False, whatever stood there.

    Raises FloatingPointError, calling them `name`, when a value under the mask is not finite; ValueError when shapes
    differ (broadcasting would silently weigh tokens).
    """
    if values.shape != mask.shape:
        raise ValueError(
            f"{name} are {tuple(values.shape)}, the mask is {tuple(mask.shape)}; give every token its own value"
        )
    kept = torch.where(mask, values, 0.0)
    finite = kept.isfinite()
    if not bool(finite.all()):
        raise FloatingPointError(
            f"{int((~finite).sum())} of {int(mask.sum())} tokens have {name} that are not finite, expected finite "
            "numbers; look at the forward pass or the rewards of this batch"
        )
    return kept


def step_mean(token_losses: Tensor, mask: Tensor, context: StepContext) -> Tensor:
    """This micro-batch's part of the mean over all tokens of the step: a scalar, to be added up.

    Raises ValueError when the step has no tokens.
    """
    if context.num_tokens < 1:
        raise ValueError(f"num_tokens of the step is {context.num_tokens}, expected at least 1; skip empty steps")
    return torch.where(mask, token_losses, 0.0).sum() / context.num_tokens


def token_sum(values: Tensor, mask: Tensor) -> Tensor:
    """Detached float64 scalar: the sum of `values` [batch, sequence] (bool counts) under the mask."""
    return torch.where(mask, values.detach().double(), 0.0).sum()


@dataclass(frozen=True, kw_only=True)
class ScoredStep:
    """The response tokens of a whole step, flat [tokens], response after response.

    What stands where `sampled` is False (tokens that were put into a response, not sampled) must touch no result.
    """

    logprobs: Tensor
    """float32 [tokens], natural log: the learner's at the weights that the step is about to change."""
    rollout_logprobs: Tensor
    """float32 [tokens], of the engine that sampled."""
    old_logprobs: Tensor
    """float32 [tokens], the learner's own before the first of several updates on a batch, or before a stage, or at the
    version that sampled (learner.old_logprobs_at); `logprobs` where these are the present weights (pi_old)."""
    advantages: Tensor
    """float32 [tokens]"""
    sampled: Tensor
    """bool [tokens]"""
    offsets: Tensor
    """int64 [responses + 1], where each response begins."""

    @property
    def row(self) -> Tensor:
        """int64 [tokens], the response that a token belongs to. Made when it is asked for: of a large step it takes
        more memory than the log-probabilities."""
        return rows(self.offsets)

    def row_sum(self, values: Tensor) -> Tensor:
        """float64 [responses]: `values` [tokens] (bool counts) summed over the sampled tokens of each response."""
        kept = torch.where(self.sampled, values.double(), 0.0)
        # In the tokens' order: a scattered sum on a GPU has none, and ranks that share a response must agree on it.
        return torch.segment_reduce(kept, "sum", lengths=self.offsets.diff(), unsafe=True)

    def row_mean(self, values: Tensor) -> Tensor:
        """float64 [responses]: the mean over sampled tokens; 0 for a response without any."""
        return self.row_sum(values) / self.row_sum(self.sampled).clamp(min=1.0)

    def log_ratios(self, upper: Tensor, lower: Tensor) -> Tensor:
        """float64 [tokens]: upper - lower, 0 where not sampled.

        Raises FloatingPointError when one under the mask is not finite.
        """
        difference = torch.where(self.sampled, upper.double() - lower.double(), 0.0)
        if not bool(difference.isfinite().all()):
            broken = int((~difference.isfinite()).sum())
            raise FloatingPointError(
                f"{broken} of {int(self.sampled.sum())} tokens have a log-ratio that is not finite; compare the "
                "learner's and the engine's logprobs of this batch"
            )
        return difference


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """What an objective decided about the whole step before its first micro-batch."""

    advantages: Tensor
    """float32 [tokens]. A veto, a correction or a sequence weight is a non-negative factor on the advantage, so it
    never touches the denominator."""
    anchor_logprobs: Tensor | None = None
    """float32 [tokens], what the ratio divides by where that is not the engine."""
    step_ess: float | None = None
    measured: Mapping[str, float] = field(default_factory=dict)
    """Shares and means over the step, by the name that metrics use."""


@dataclass(frozen=True, kw_only=True)
class Facts:
    """State what recipes, planner and learner must know of an objective with its settings."""

    needs_scoring: bool = False
    """Whether a pass over the whole step without gradients, and `prepare`, must come first."""
    needs_old_logprobs: bool = False
    """Whether `ScoredStep.old_logprobs` are read. They cost a pass of their own where a stage has several steps."""
    needs_sampling_logprobs: bool = False
    """Whether `ScoredStep.old_logprobs` must be those at the version that sampled each token; else
    learner.old_logprobs_at says which they are. An objective that has this has `needs_old_logprobs`."""
    reads_step_logprobs: bool = True
    """Whether `prepare` reads `ScoredStep.logprobs`. If not, a step whose old log-probabilities are known already is
    not scored, and these stand in their place."""
    weighs_by_rollout_ratio: bool = True
    """Whether the loss divides by the engine's probability. If so, a correction by pi_old / pi_engine would count the
    engine's mismatch twice."""
    clips_by_old_ratio: bool = False
    """Whether a clip is around pi_old: it acts only where pi_old is older than the step that is made."""
    has_term_without_advantage: bool = False
    """Whether the loss has a term that does not carry the advantage. It would be averaged otherwise than the rest if
    aggregation acted through the advantages, or if groups without advantage were dropped."""
    depends_on_micro_batches: bool = False
    """Whether the loss of a token depends on the others of its micro-batch. A run then goes on with the layout and the
    size of micro-batches that it began with."""


class Objective(Settings, ABC):
    """Settings and mathematics of one objective.

    A subclass is frozen and refuses unknown keys. The default of its field `name` is what recipes and reports call it.
    Only `loss` must be written; the rest has the defaults below.
    """

    name: str

    paper_aggregation: ClassVar[Aggregation | None] = None
    """What advantage.aggregation is where a recipe does not set it; None leaves that to the advantage."""
    may_drop_responses: ClassVar[bool] = False
    """Whether OPSM may drop failed responses: the loss has no rule of its own for those that the learner has left."""

    @property
    def facts(self) -> Facts:
        """Return its facts; a subclass replaces those that differ (dataclasses.replace)."""
        return Facts(needs_scoring=type(self).prepare is not Objective.prepare)

    def prepare(self, step: ScoredStep) -> Prepared:
        """Decide what concerns whole responses or the whole step. Called only with `Facts.needs_scoring`.

        Raises FloatingPointError when a log-ratio that it reads is not finite.
        """
        return Prepared(advantages=step.advantages)

    @abstractmethod
    def loss(self, logprobs: Tensor, batch: TokenBatch, context: StepContext) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss and sums of one micro-batch.

        `logprobs` is [batch, sequence] float32 with gradient: the learner's, for the sampled tokens. The sums are
        detached scalars that add up over micro-batches and ranks; divided by `num_tokens` they are means. Raises
        FloatingPointError when a log-ratio or an advantage under the mask is not finite, ValueError when the step was
        not prepared as this objective needs it.
        """


def score_function_loss(logprobs: Tensor, batch: TokenBatch, context: StepContext) -> Tensor:
    """This micro-batch's part of -1/N sum_t A_t log pi(y_t): all weights are in the advantages already.

    Raises FloatingPointError when a logprob or an advantage under the mask is not finite.
    """
    learner = response_values(logprobs, batch.mask, "logprobs")
    advantages = response_values(batch.advantages, batch.mask, "advantages")
    return step_mean(-advantages * learner, batch.mask, context)


def rollout_k3(logprobs: Tensor, batch: TokenBatch) -> Tensor:
    """Detached float64 scalar: the sum of rho - 1 - log rho, whose mean estimates KL(engine || learner) in nats.

    Raises FloatingPointError when a log-ratio under the mask is not finite.
    """
    log_ratios, _ = masked_log_ratios(logprobs.detach(), batch.rollout_logprobs, batch.mask)
    return token_sum(log_ratios.expm1() - log_ratios, batch.mask)


def scaled_advantages(step: ScoredStep, factors: Tensor) -> Tensor:
    """[tokens] in the dtype of the advantages: these times `factors` [tokens]; 0 where not sampled."""
    return torch.where(step.sampled, step.advantages * factors, 0.0).to(step.advantages.dtype)


def sampled_mean(step: ScoredStep, values: Tensor) -> float:
    """The mean of `values` [tokens] (bool counts) over the sampled tokens; 0 without any."""
    return float(torch.where(step.sampled, values.double(), 0.0).sum() / step.sampled.sum().clamp(min=1))

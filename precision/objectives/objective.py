"""Define the interface of objectives.

An objective is one class. Its fields are the keys of a recipe's `objective` section; its methods are the mathematics;
its `Facts` are what recipes, planner and reports need to know of it. `loss` takes the tensors of one micro-batch and
returns one scalar. It knows no rank, file or engine. The denominator is passed in, so losses of micro-batches add up.

Properties of whole responses or of the whole step (ESS, vetoes, sequence ratios) cannot be seen from a micro-batch. An
objective that needs them has the step scored first, without gradients, and decides in `prepare`, once, on flat tensors
that are the same on every rank, so neither layout nor micro-batch size can change the decision. An objective whose
`loss` looks at its micro-batch as a whole declares `Facts.depends_on_micro_batches`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from precision.ratios import masked_log_ratios, require, rows
from precision.settings import Settings
from precision.torch_on_use import Tensor, torch

Aggregation = Literal["token", "sequence", "prompt", "constant"]
"""Units that count alike in the mean of a loss; see `pipeline.advantages.compute`."""


@dataclass(frozen=True, kw_only=True)
class TokenBatch:
    """The response tokens of one micro-batch. All fields are [batch, sequence]; where `mask` is False a field may hold
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
    """Facts of the step that a micro-batch cannot know by itself."""

    num_tokens: int
    """Sampled response tokens of the whole optimizer step, over all micro-batches and ranks: the loss denominator."""
    step_ess: float | None = None
    sum_over_ranks: Callable[[Tensor], Tensor] = lambda sums: sums
    """All-reduce of a float64 vector over data and context parallel ranks (identity in one process)."""


def response_values(values: Tensor, mask: Tensor, name: str) -> Tensor:
    """Return `values` [batch, sequence] with 0 where `mask` is False, whatever stood there. Raises FloatingPointError,
    calling them `name`, when a value under the mask is not finite; ValueError when shapes differ."""
    if values.shape != mask.shape:
        raise ValueError(
            f"{name} are {tuple(values.shape)}, the mask is {tuple(mask.shape)}; give every token its own value"
        )
    kept = torch.where(mask, values, 0.0)
    finite = kept.isfinite()
    require(
        finite,
        lambda: (
            f"{int((~finite).sum())} of {int(mask.sum())} tokens have {name} that are not finite, expected finite "
            "numbers; look at the forward pass or the rewards of this batch"
        ),
    )
    return kept


def step_mean(token_losses: Tensor, mask: Tensor, context: StepContext) -> Tensor:
    """Return this micro-batch's part of the mean over all tokens of the step: a scalar, to be added up. Raises
    ValueError when the step has no tokens."""
    if context.num_tokens < 1:
        raise ValueError(f"num_tokens of the step is {context.num_tokens}, expected at least 1; skip empty steps")
    return torch.where(mask, token_losses, 0.0).sum() / context.num_tokens


def token_sum(values: Tensor, mask: Tensor) -> Tensor:
    """Return the sum of `values` [batch, sequence] (bool counts) under the mask, a detached float64 scalar."""
    return torch.where(mask, values.detach().double(), 0.0).sum()


@dataclass(frozen=True, kw_only=True)
class ScoredStep:
    """The response tokens of a whole step, flat [tokens], response after response; all of an episode are one response,
    however many turns and rows it has. Values where `sampled` is False (tokens that were put into a response, not
    sampled) must touch no result."""

    logprobs: Tensor
    """float32 [tokens], natural log, by the learner at the weights that the step is about to change."""
    rollout_logprobs: Tensor
    """float32 [tokens], by the engine that sampled."""
    old_logprobs: Tensor
    """float32 [tokens], by pi_old: the learner before the first of several updates on a batch, or before a stage, or at
    the version that sampled (learner.old_logprobs_at); `logprobs` where these are the present weights."""
    advantages: Tensor
    """float32 [tokens]"""
    sampled: Tensor
    """bool [tokens]"""
    offsets: Tensor
    """int64 [responses + 1], where each response begins."""

    @property
    def row(self) -> Tensor:
        """int64 [tokens], the response of each token. Made on demand: it may be larger than the log-probabilities."""
        return rows(self.offsets)

    def row_sum(self, values: Tensor) -> Tensor:
        """Return each response's sum of `values` [tokens] (bool counts) over sampled tokens, float64 [responses]."""
        kept = torch.where(self.sampled, values.double(), 0.0)
        # In the tokens' order: a scattered sum on a GPU has none, and ranks that share a response must agree on it.
        return torch.segment_reduce(kept, "sum", lengths=self.offsets.diff(), unsafe=True)

    def row_mean(self, values: Tensor) -> Tensor:
        """Return the mean over sampled tokens, float64 [responses]; 0 for a response without any."""
        return self.row_sum(values) / self.row_sum(self.sampled).clamp(min=1.0)

    def log_ratios(self, upper: Tensor, lower: Tensor) -> Tensor:
        """Return upper - lower, float64 [tokens], 0 where not sampled. Raises FloatingPointError on NaN or infinity."""
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
    """An objective's decisions about the whole step before its first micro-batch."""

    advantages: Tensor
    """float32 [tokens]. A veto, a correction or a sequence weight is a non-negative factor on the advantage, so it
    never touches the denominator."""
    anchor_logprobs: Tensor | None = None
    """float32 [tokens], the denominator of the ratio where that is not the engine."""
    step_ess: float | None = None
    measured: Mapping[str, float] = field(default_factory=dict)
    """Shares and means over the step, by metric name."""


@dataclass(frozen=True, kw_only=True)
class Facts:
    """Properties of an objective with its settings, for recipes, planner and learner."""

    needs_scoring: bool = False
    """Whether a pass over the whole step without gradients, and `prepare`, must come first."""
    needs_old_logprobs: bool = False
    """Whether `ScoredStep.old_logprobs` are read. They cost a separate pass where a stage has several steps."""
    needs_sampling_logprobs: bool = False
    """Whether `ScoredStep.old_logprobs` must be of the version that sampled each token; otherwise
    learner.old_logprobs_at decides. Implies `needs_old_logprobs`."""
    reads_step_logprobs: bool = True
    """Whether `prepare` reads `ScoredStep.logprobs`. If not, a step whose old log-probabilities are known is not
    scored, and they stand in for `logprobs`."""
    weighs_by_rollout_ratio: bool = True
    """Whether the loss divides by the engine's probability; a correction by pi_old / pi_engine would count it again."""
    clips_by_old_ratio: bool = False
    """Whether a clip is around pi_old: it acts only where pi_old is older than the weights of the step."""
    has_term_without_advantage: bool = False
    """Whether the loss has a term without the advantage. Aggregation acts through the advantages, so it would average
    that term differently from the rest, as would dropping groups without advantage."""
    depends_on_micro_batches: bool = False
    """Whether a token's loss depends on others of its micro-batch. A run must then keep layout and micro-batch size."""


class Objective(Settings, ABC):
    """Settings and mathematics of an objective. Only `loss` must be defined. A subclass is frozen and refuses unknown
    keys. Recipes and reports name it by the default of its field `name`."""

    name: str

    paper_aggregation: ClassVar[Aggregation | None] = None
    """Value of advantage.aggregation where a recipe does not set it; None leaves it to the advantage."""
    may_drop_responses: ClassVar[bool] = False
    """Whether OPSM may drop failed responses: the loss has no rule for responses that the learner left."""

    @property
    def facts(self) -> Facts:
        """Facts of this objective; a subclass replaces those that differ (dataclasses.replace)."""
        return Facts(needs_scoring=type(self).prepare is not Objective.prepare)

    def prepare(self, step: ScoredStep) -> Prepared:
        """Decide about whole responses or the whole step. Called only with `Facts.needs_scoring`. Raises
        FloatingPointError when a log-ratio that it reads is not finite."""
        return Prepared(advantages=step.advantages)

    @abstractmethod
    def loss(self, logprobs: Tensor, batch: TokenBatch, context: StepContext) -> tuple[Tensor, dict[str, Tensor]]:
        """Return loss and sums of one micro-batch. `logprobs` is [batch, sequence] float32 with gradient: the
        learner's, for the sampled tokens. The sums are detached scalars that add up over micro-batches and ranks;
        divided by `num_tokens` they are means. Raises FloatingPointError when a log-ratio or an advantage under the
        mask is not finite, ValueError when the step was not prepared as this objective needs it."""


def score_function_loss(logprobs: Tensor, batch: TokenBatch, context: StepContext) -> Tensor:
    """Return this micro-batch's part of -1/N sum_t A_t log pi(y_t), with all weights in the advantages already. Raises
    FloatingPointError when a logprob or an advantage under the mask is not finite."""
    learner = response_values(logprobs, batch.mask, "logprobs")
    advantages = response_values(batch.advantages, batch.mask, "advantages")
    return step_mean(-advantages * learner, batch.mask, context)


def rollout_k3(logprobs: Tensor, batch: TokenBatch) -> Tensor:
    """Return the sum of rho - 1 - log rho, a detached float64 scalar, whose mean estimates KL(engine || learner) in
    nats. Raises FloatingPointError when a log-ratio under the mask is not finite."""
    log_ratios, _ = masked_log_ratios(logprobs.detach(), batch.rollout_logprobs, batch.mask)
    return token_sum(log_ratios.expm1() - log_ratios, batch.mask)


def scaled_advantages(step: ScoredStep, factors: Tensor) -> Tensor:
    """Return the advantages times `factors` [tokens], in the advantages' dtype; 0 where not sampled."""
    return torch.where(step.sampled, step.advantages * factors, 0.0).to(step.advantages.dtype)


def sampled_mean(step: ScoredStep, values: Tensor) -> float:
    """Return the mean of `values` [tokens] (bool counts) over the sampled tokens; 0 without any."""
    return float(torch.where(step.sampled, values.double(), 0.0).sum() / step.sampled.sum().clamp(min=1))

"""What all objectives do with the token axis: mask, check, sum, divide."""

from __future__ import annotations

from precision.objectives.base import ScoredStep, StepContext, TokenBatch
from precision.ratios import masked_log_ratios
from precision.torch_on_use import Tensor, torch


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

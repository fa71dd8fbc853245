"""Effective sample size (ESS): the share of a batch that still counts once it is reweighted by importance ratios.

With ratios rho_t = pi_learner(y_t) / pi_engine(y_t) of N tokens, P3O (arXiv 2605.12380, Eq. 11) uses

    e = S1^2 / (N (S2 + 1e-8)),   S1 = sum rho_t,   S2 = sum rho_t^2,   1/N <= e <= 1.

Equal ratios give 1; one ratio that dwarfs the rest gives 1/N. For lognormal ratios with log-standard-deviation s the
expectation is exp(-s^2): .05 -> .9975, .1 -> .990, .2 -> .961, .5 -> .779, 1 -> .368.
"""

from __future__ import annotations

import math

from precision.torch_on_use import Tensor

ESS_EPSILON = 1e-8
"""Added to S2, as P3O's authors do, so that ratios that all underflow do not divide by zero."""


def ess_from_sums(sum_ratio: float, sum_squared_ratio: float, num_tokens: float) -> float:
    """Token ESS, in [1/num_tokens, 1], from sums over all micro-batches and ranks.

    The lower bound is enforced: `ESS_EPSILON` would break it when every ratio is below about 1e-4.
    Raises FloatingPointError on a non-finite sum (an ESS of 1 there would switch all protection off exactly when the
    numbers are broken) and ValueError without tokens.
    """
    if num_tokens < 1:
        raise ValueError(f"the ESS of {num_tokens} tokens is undefined, expected at least 1; do not train empty steps")
    if not (math.isfinite(sum_ratio) and math.isfinite(sum_squared_ratio)):
        raise FloatingPointError(
            f"importance ratio sums are {sum_ratio} and {sum_squared_ratio}, expected finite numbers; compare the "
            "learner's and the engine's logprobs of this batch"
        )
    value = sum_ratio**2 / (num_tokens * (sum_squared_ratio + ESS_EPSILON))
    return min(1.0, max(1.0 / num_tokens, value))


def token_ess(log_ratios: Tensor) -> float:
    """ESS of one set of tokens; `log_ratios` is [tokens], natural log, no padding. Raises as `ess_from_sums`."""
    ratios = log_ratios.detach().double().exp()
    return ess_from_sums(float(ratios.sum()), float(ratios.square().sum()), ratios.numel())


def staleness_ess(mismatch: Tensor, staleness: Tensor) -> float:
    """ESS of pi / pi_old under pi_old, from samples of the engine pi_b, in (0, 1].

    `mismatch` = log pi_old - log pi_b and `staleness` = log pi - log pi_old are [tokens], natural log, no padding, with
    pi_old the learner at the version that sampled. With w_q and w_s their exponentials and rho = w_q w_s it is

        (sum rho)^2 / (sum w_q · sum rho w_s):

    each sum over samples of pi_b, weighed by w_q, stands for one over samples of pi_old. Without mismatch it is the
    plain ESS of w_s. Raises FloatingPointError when a log-ratio is not finite, ValueError without tokens.
    """
    if mismatch.numel() < 1:
        raise ValueError("the ESS of 0 tokens is undefined, expected at least 1; do not train empty steps")
    q, s = mismatch.detach().double(), staleness.detach().double()
    log_value = 2.0 * (q + s).logsumexp(dim=0) - q.logsumexp(dim=0) - (q + 2.0 * s).logsumexp(dim=0)
    value = float(log_value.exp())
    if not (math.isfinite(value) and value > 0.0):
        raise FloatingPointError(
            f"the ESS of the staleness is {value}, expected a number above 0; compare the learner's and the engine's "
            "logprobs of this batch"
        )
    return min(1.0, value)


def loss_of(ess: float) -> float:
    """-ln ESS, nats: for independent lognormal ratios the variance of the log-ratio, so that the losses of independent
    causes add up."""
    return -math.log(ess) if ess < 1.0 else 0.0


def sequence_ess_of_totals(totals: Tensor) -> float:
    """ESS of whole sequences, in [1/sequences, 1]; `totals` is float64 [sequences], the log-ratio of each sequence.

    A sequence's ratio is the product over its tokens. It is computed in logs, since products over long sequences
    overflow, hence without `ESS_EPSILON`. Raises FloatingPointError when a log-ratio is not finite, ValueError without
    sequences.
    """
    if totals.numel() < 1:
        raise ValueError("the ESS of 0 sequences is undefined, expected at least 1; do not train empty steps")
    if not bool(totals.isfinite().all()):
        raise FloatingPointError(
            "a sequence log-ratio is not finite, expected finite numbers; compare the learner's and the engine's "
            "logprobs of this batch"
        )
    log_value = 2.0 * totals.logsumexp(dim=0) - (2.0 * totals).logsumexp(dim=0) - math.log(totals.numel())
    return min(1.0, float(log_value.exp()))

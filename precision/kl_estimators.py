"""Two estimators of KL(pi || pi_b) from sampled tokens, with l = log pi - log pi_b and rho = exp(l).

`official`, as in P3O's published code: K = l + exp(clip(-l, -10, 10)) - 1. It is the k3 estimator
(joschu.net/blog/kl-approx.html) for samples from pi. Rollouts are samples from pi_b, and there its mean is
chi^2(pi_b || pi) - KL(pi_b || pi): another divergence, mass-covering and heavy-tailed. Its gradient here is
1 - exp(clip(-l, -10, 10)). Differentiating the clipped form instead gives +1 below l = -10, where the true slope is
hugely negative, and pushes a vanishing token further down.

`importance`: K = rho l - rho + 1, unbiased for samples from pi_b. The gradient is sg(min(rho, cap)) l grad log pi: the
true slope is rho l, and the cap keeps one token from dominating. (The cap is ours, not the paper's.)
"""

from __future__ import annotations

from precision.torch_on_use import Tensor, torch

KL_EXPONENT_LIMIT = 10.0
"""Nats. Bound on |l| inside the exponential of the official estimator, the authors' own."""


def official_kl(log_ratios: Tensor) -> Tensor:
    """K of every token, in nats, shaped as `log_ratios`, with the safe gradient; for samples from the learner."""
    detached = log_ratios.detach()
    # expm1 instead of exp - 1: at l = 1e-3 the value is 5e-7, below float32's resolution around 1.
    rise = torch.expm1((-detached).clamp(-KL_EXPONENT_LIMIT, KL_EXPONENT_LIMIT))
    return with_gradient(detached + rise, -rise, log_ratios)


def importance_kl(log_ratios: Tensor, cap: float) -> Tensor:
    """K of every token, in nats, shaped as `log_ratios`; for samples from the engine. `cap` bounds the weight of a
    token in the gradient, never in the value."""
    detached = log_ratios.detach()
    ratios = detached.exp()
    return with_gradient(ratios * detached - torch.expm1(detached), ratios.clamp(max=cap) * detached, log_ratios)


def with_gradient(value: Tensor, gradient: Tensor, variable: Tensor) -> Tensor:
    """A tensor that reads `value` and whose derivative in `variable` is `gradient`, element by element."""
    return value.detach() + gradient.detach() * (variable - variable.detach())

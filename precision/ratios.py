"""Compute log-ratios between the policy that learns and the engine that sampled, and from them ESS, statistics that add
up, KL estimators and factors on the learning rate.

    l_t = log pi_learner(y_t) - log pi_engine(y_t),   rho_t = exp(l_t),   y_t sampled by the engine.

`RatioSums` holds sums, maxima and a histogram, so that ranks merge by one all-reduce of each tensor (SUM, MAX, SUM).
Effective sample size (ESS) is the share of a batch that still counts once it is reweighted by importance ratios. With
the ratios of N tokens, P3O (arXiv 2605.12380, Eq. 11) uses

    e = S1^2 / (N (S2 + 1e-8)),   S1 = sum rho_t,   S2 = sum rho_t^2,   1/N <= e <= 1.

Equal ratios give 1; one ratio that dwarfs the rest gives 1/N. For lognormal ratios with log-standard-deviation s the
expectation is exp(-s^2): .05 -> .9975, .1 -> .990, .2 -> .961, .5 -> .779, 1 -> .368.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Literal

from precision.torch_on_use import Tensor, torch

_MAGNITUDES = tuple(10.0 ** (quarter / 4) for quarter in range(-20, 5))
"""1e-5 to 10, four a decade: from float32 noise to a token the learner would hardly ever sample."""


LOG_RATIO_EDGES: tuple[float, ...] = (*(-magnitude for magnitude in reversed(_MAGNITUDES)), *_MAGNITUDES)
"""Symmetric bin edges of log pi_learner - log pi_engine (nats), ascending. Bin i holds edges[i-1] <= l < edges[i]: bin
0 is everything below the first edge, the last bin everything from the last edge up."""


NUM_LOG_RATIO_BINS = len(LOG_RATIO_EDGES) + 1
"""Number of bins, with underflow and overflow; the middle bin holds log-ratios around zero."""


ESS_EPSILON = 1e-8
"""Added to S2, as P3O's authors do, so that ratios that all underflow do not divide by zero."""


def ess_from_sums(sum_ratio: float, sum_squared_ratio: float, num_tokens: float) -> float:
    """Return the token ESS, in [1/num_tokens, 1], from sums over all micro-batches and ranks. The lower bound is
    enforced: `ESS_EPSILON` would break it when every ratio is below about 1e-4. Raises FloatingPointError on a
    non-finite sum, since an ESS of 1 there would switch all protection off, and ValueError without tokens."""
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
    """Return the ESS of tokens; `log_ratios` is [tokens], natural log, no padding. Raises as `ess_from_sums`."""
    ratios = log_ratios.detach().double().exp()
    return ess_from_sums(float(ratios.sum()), float(ratios.square().sum()), ratios.numel())


def staleness_ess(mismatch: Tensor, staleness: Tensor) -> float:
    """Return the ESS of pi / pi_old under pi_old, from samples of the engine pi_b, in (0, 1].

    `mismatch` = log pi_old - log pi_b and `staleness` = log pi - log pi_old are [tokens], natural log, no padding, with
    pi_old the learner at the version that sampled. With w_q and w_s their exponentials and rho = w_q w_s it is

        (sum rho)^2 / (sum w_q · sum rho w_s):

    each sum over samples of pi_b, weighed by w_q, stands for a sum over samples of pi_old. Without mismatch it is the
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


def sequence_ess_of_totals(totals: Tensor) -> float:
    """Return the ESS of whole sequences, in [1/sequences, 1]; `totals` is float64 [sequences], the log-ratio of each. A
    sequence's ratio is the product over its tokens. Products over long sequences overflow, so it is computed in logs,
    without `ESS_EPSILON`. Raises FloatingPointError on a non-finite log-ratio, ValueError without sequences."""
    if totals.numel() < 1:
        raise ValueError("the ESS of 0 sequences is undefined, expected at least 1; do not train empty steps")
    if not bool(totals.isfinite().all()):
        raise FloatingPointError(
            "a sequence log-ratio is not finite, expected finite numbers; compare the learner's and the engine's "
            "logprobs of this batch"
        )
    log_value = 2.0 * totals.logsumexp(dim=0) - (2.0 * totals).logsumexp(dim=0) - math.log(totals.numel())
    return min(1.0, float(log_value.exp()))


def loss_of(ess: float) -> float:
    """Return -ln ESS, nats. For lognormal ratios it is the log-ratio's variance, so independent losses add up."""
    return -math.log(ess) if ess < 1.0 else 0.0


MAX_LOG_RATIO = 40.0
"""Nats. float32 holds numbers up to e^88. A ratio of e^40 leaves room for its square, for any advantage and for the sum
over a micro-batch. It also means that the policies have nothing in common: the engine's probability is below 5e-18."""


def masked_log_ratios(learner_logprobs: Tensor, rollout_logprobs: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Return log-ratios and ratios, both [batch, sequence] in the logprobs' dtype, with 0 and 1 where `mask` is False.
    The gradient flows through `learner_logprobs`. Raises FloatingPointError when a log-ratio under the mask is not
    finite or above MAX_LOG_RATIO, ValueError when shapes differ."""
    log_ratios = masked_differences(learner_logprobs, rollout_logprobs, mask)
    require_usable(log_ratios, lambda: f"of {int(mask.sum())} tokens")
    return log_ratios, log_ratios.exp()


def masked_differences(logprobs: Tensor, others: Tensor, mask: Tensor) -> Tensor:
    """Return log pi - log pi_other, [batch, sequence] in the logprobs' dtype, of any size, with 0 where `mask` is
    False. Both inputs are replaced behind the mask before they are subtracted, so NaN or -inf there reaches neither
    value nor gradient; the gradient flows through `logprobs`. Raises ValueError when shapes differ."""
    if not logprobs.shape == others.shape == mask.shape:
        raise ValueError(
            f"shapes differ: logprobs {tuple(logprobs.shape)}, others {tuple(others.shape)}, mask "
            f"{tuple(mask.shape)}; pass one row per sample, padded alike"
        )
    return torch.where(mask, logprobs, 0.0) - torch.where(mask, others, 0.0)


def require_usable(log_ratios: Tensor, among: Callable[[], str]) -> None:
    """Require that all `log_ratios`, of any shape, are finite and at most MAX_LOG_RATIO; `among` ends the count of
    those that are not. Raises as `require`."""
    usable = log_ratios.isfinite() & (log_ratios <= MAX_LOG_RATIO)

    def message() -> str:
        worst = log_ratios.detach()[~usable]
        return (
            f"{worst.numel()} {among()} have an unusable log-ratio, the first {float(worst[0])}; expected finite and "
            f"at most {MAX_LOG_RATIO:g}; compare the learner's and the engine's logprobs"
        )

    require(usable, message)


_deferred: ContextVar[list[Tensor] | None] = ContextVar("_deferred", default=None)


def require(holds: Tensor, message: Callable[[], str]) -> None:
    """Raise FloatingPointError with `message` unless `holds` (bool) is True everywhere. Inside `deferred_checks`, note
    the answer instead."""
    noted = _deferred.get()
    if noted is not None:
        noted.append(holds.all())
    elif not bool(holds.all()):
        raise FloatingPointError(message())


@contextmanager
def deferred_checks() -> Iterator[list[Tensor]]:
    """Collect what `require` finds, bool scalars on the device, instead of raising: the host would wait for the GPU to
    read each. Numbers that fail flow on, so read the answers before you use any result."""
    noted = list[Tensor]()
    token = _deferred.set(noted)
    try:
        yield noted
    finally:
        _deferred.reset(token)


SUMS = (
    "num_tokens",
    "ratio",
    "ratio_squared",
    "log_ratio",
    "log_ratio_abs",
    "k3",
    "log_ratio_squared",
    "ratio_above_one",
    "ratio_above_2",
    "ratio_below_half",
    "ratio_above_10",
    "ratio_below_tenth",
    "learner_logprob",
    "rollout_logprob",
    "learner_logprob_squared",
    "rollout_logprob_squared",
    "logprob_product",
    "learner_probability",
    "rollout_probability",
    "learner_probability_squared",
    "rollout_probability_squared",
    "probability_product",
    "probability_gap_abs",
)
"""Quantities summed over tokens, in this order. `k3` is rho - 1 - l and `ratio_above_one` is max(rho, 1/rho)."""


_LEAST_SPREAD = 1e-12
"""Least variance as a share of the mean square: below it, float64 sums are noise."""


def ratio_terms(learner_logprobs: Tensor, rollout_logprobs: Tensor) -> Tensor:
    """Return each token's summands, float64 [tokens, len(SUMS)]; both inputs are float64 [tokens], nats, already
    checked. Every term is finite: 1/rho is cut at e^MAX_LOG_RATIO, and a probability at 1."""
    log_ratios = learner_logprobs - rollout_logprobs
    ratios = log_ratios.exp()
    learner, rollout = learner_logprobs.clamp(max=0.0).exp(), rollout_logprobs.clamp(max=0.0).exp()
    terms = (
        torch.ones_like(ratios),
        ratios,
        ratios.square(),
        log_ratios,
        log_ratios.abs(),
        # expm1 keeps the digits that rho - 1 loses when the two sides nearly agree.
        torch.expm1(log_ratios) - log_ratios,
        log_ratios.square(),
        log_ratios.abs().clamp(max=MAX_LOG_RATIO).exp(),
        ratios > 2.0,
        ratios < 0.5,
        ratios > 10.0,
        ratios < 0.1,
        learner_logprobs,
        rollout_logprobs,
        learner_logprobs.square(),
        rollout_logprobs.square(),
        learner_logprobs * rollout_logprobs,
        learner,
        rollout,
        learner.square(),
        rollout.square(),
        learner * rollout,
        (learner - rollout).abs(),
    )
    return torch.stack([term.double() for term in terms], dim=1)


def log_ratio_bins(log_ratios: Tensor) -> Tensor:
    """Return the bin of each value in the histogram of LOG_RATIO_EDGES, int64, shaped as the float64 `log_ratios`."""
    edges = torch.tensor(LOG_RATIO_EDGES, dtype=torch.float64, device=log_ratios.device)
    return torch.bucketize(log_ratios, edges, right=True)


@dataclass(frozen=True)
class RatioSums:
    """Additive statistics of log-ratios; all tensors float64 on one device. Ratios are importance weights of the
    engine's samples, so every mean below is an expectation under the engine's policy."""

    sums: Tensor
    """[len(SUMS)]. All-reduce with SUM."""
    maxima: Tensor
    """[2], max l and max -l; -inf without tokens. All-reduce with MAX."""
    histogram: Tensor
    """[NUM_LOG_RATIO_BINS], tokens by l, edges LOG_RATIO_EDGES. All-reduce with SUM."""

    @classmethod
    def zero(cls, device: torch.device | None = None) -> RatioSums:
        """Return the statistics of no tokens, which change nothing when ranks are merged."""
        return cls(
            sums=torch.zeros(len(SUMS), dtype=torch.float64, device=device),
            maxima=torch.full((2,), -math.inf, dtype=torch.float64, device=device),
            histogram=torch.zeros(NUM_LOG_RATIO_BINS, dtype=torch.float64, device=device),
        )

    @classmethod
    def from_logprobs(cls, learner_logprobs: Tensor, rollout_logprobs: Tensor, mask: Tensor) -> RatioSums:
        """Return the statistics of the tokens under `mask`; all three are [batch, sequence], logprobs in nats, mask
        bool. Differences are taken in float64. Raises as `masked_log_ratios`."""
        learner, rollout = learner_logprobs.detach().double(), rollout_logprobs.double()
        log_ratios = masked_log_ratios(learner, rollout, mask)[0][mask]
        if not log_ratios.numel():
            return cls.zero(log_ratios.device)
        return cls(
            sums=ratio_terms(learner[mask], rollout[mask]).sum(dim=0),
            maxima=torch.stack([log_ratios.max(), (-log_ratios).max()]),
            histogram=torch.bincount(log_ratio_bins(log_ratios), minlength=NUM_LOG_RATIO_BINS).double(),
        )

    @property
    def num_tokens(self) -> int:
        return int(self.sums[0])

    def statistics(self) -> dict[str, float]:
        """Return all of them under the names that metrics use. Raises ValueError without tokens.

        ess                     token ESS of P3O, in [1/num_tokens, 1]
        chi2                    chi^2(learner || engine) = E[rho^2] - 1; from finite samples it may come out below 0
        k1_kl, k2_kl, k3_kl     KL(engine || learner), nats: the means of -l, unbiased, of either sign; of l^2 / 2,
                                biased, of low variance; of rho - 1 - l, unbiased and never negative
                                (joschu.net/blog/kl-approx.html)
        log_ratio_mean          the signed gap, nats: above 0 the learner finds the tokens more likely than the engine
        ratio_mean              E[rho], 1 in expectation when the engine's support covers the learner's
        probability_error       mean of max(rho, 1/rho), at least 1: NeMo-RL's `token_mult_prob_error`
        logprob_pearson,        correlations of the two sides' log-probabilities and probabilities (verl logs the
        probability_pearson     latter); left out where either side hardly varies
        """
        count = self.num_tokens
        if count < 1:
            raise ValueError("ratio statistics of 0 tokens are undefined, expected at least 1; check the mask")
        total = dict(zip(SUMS, self.sums.tolist(), strict=True))
        mean = {name: value / count for name, value in total.items()}
        highest, negated_lowest = self.maxima.tolist()
        found: dict[str, float | None] = {
            "ess": ess_from_sums(total["ratio"], total["ratio_squared"], count),
            "chi2": mean["ratio_squared"] - 1.0,
            "k1_kl": -mean["log_ratio"],
            "k2_kl": mean["log_ratio_squared"] / 2.0,
            "k3_kl": mean["k3"],
            "log_ratio_mean": mean["log_ratio"],
            "log_ratio_abs_mean": mean["log_ratio_abs"],
            "ratio_mean": mean["ratio"],
            "ratio_max": math.exp(highest),
            "ratio_min": math.exp(-negated_lowest),
            "ratio_above_2_share": mean["ratio_above_2"],
            "ratio_below_half_share": mean["ratio_below_half"],
            "ratio_above_10_share": mean["ratio_above_10"],
            "ratio_below_tenth_share": mean["ratio_below_tenth"],
            "probability_error": mean["ratio_above_one"],
            "probability_gap_abs_mean": mean["probability_gap_abs"],
            "logprob_pearson": _pearson(mean, "logprob"),
            "probability_pearson": _pearson(mean, "probability"),
            "num_tokens": float(count),
        }
        return {name: value for name, value in found.items() if value is not None}


def _pearson(mean: Mapping[str, float], what: str) -> float | None:
    """Correlate the two sides, from the means of SUMS; None where either hardly varies."""
    learner, rollout = mean[f"learner_{what}"], mean[f"rollout_{what}"]
    learner_square, rollout_square = mean[f"learner_{what}_squared"], mean[f"rollout_{what}_squared"]
    learner_variance, rollout_variance = learner_square - learner**2, rollout_square - rollout**2
    if learner_variance <= _LEAST_SPREAD * learner_square or rollout_variance <= _LEAST_SPREAD * rollout_square:
        return None
    covariance = mean[f"{what}_product"] - learner * rollout
    return max(-1.0, min(1.0, covariance / math.sqrt(learner_variance * rollout_variance)))


KL_EXPONENT_LIMIT = 10.0
"""Nats. Bound on |l| inside the exponential of the official estimator, as its authors set it."""


def official_kl(log_ratios: Tensor) -> Tensor:
    """Return K = l + exp(clip(-l, -10, 10)) - 1 of every token, in nats, shaped as `log_ratios`: the estimate of KL(pi
    || pi_b) in P3O's published code.

    It is the k3 estimator (joschu.net/blog/kl-approx.html) for samples from pi. Rollouts are samples from pi_b, and
    there its mean is chi^2(pi_b || pi) - KL(pi_b || pi): another divergence, mass-covering and heavy-tailed. Its
    gradient here is 1 - exp(clip(-l, -10, 10)). Differentiating the clipped form instead gives +1 below l = -10, where
    the true slope is hugely negative, and pushes a vanishing token further down.
    """
    detached = log_ratios.detach()
    # expm1 instead of exp - 1: at l = 1e-3 the value is 5e-7, below float32's resolution around 1.
    rise = torch.expm1((-detached).clamp(-KL_EXPONENT_LIMIT, KL_EXPONENT_LIMIT))
    return with_gradient(detached + rise, -rise, log_ratios)


def importance_kl(log_ratios: Tensor, cap: float) -> Tensor:
    """Return K = rho l - rho + 1 of every token, in nats, shaped as `log_ratios`: an unbiased estimate of KL(pi ||
    pi_b) from samples of the engine. The gradient is sg(min(rho, cap)) l grad log pi: the true slope is rho l, and
    `cap`, which is ours and not the paper's, keeps one token from dominating."""
    detached = log_ratios.detach()
    ratios = detached.exp()
    return with_gradient(ratios * detached - torch.expm1(detached), ratios.clamp(max=cap) * detached, log_ratios)


def with_gradient(value: Tensor, gradient: Tensor, variable: Tensor) -> Tensor:
    """Return a tensor that reads `value` and whose derivative in `variable` is `gradient`, element by element."""
    return value.detach() + gradient.detach() * (variable - variable.detach())


def rows(offsets: Tensor) -> Tensor:
    """Return the response of each value, int64 [offsets[-1]]; `offsets` is int64 [responses + 1], from 0."""
    lengths = offsets.diff()
    return torch.repeat_interleave(torch.arange(len(lengths), device=offsets.device), lengths)


def positions(offsets: Tensor) -> Tensor:
    """Return the place of each value in its response, int64 [offsets[-1]], from 0."""
    return torch.arange(int(offsets[-1]), device=offsets.device) - torch.repeat_interleave(offsets[:-1], offsets.diff())


LrByLag = Literal["none", "sqrt", "ess"]


def lr_factor(age: float) -> float:
    """Return (1 + age)^(-1/2) for a batch whose tokens were sampled `age` optimizer steps ago in the mean. An older
    policy's samples say less about where the present policy should go. Staleness-aware SGD (arXiv 1511.05950) divides
    the learning rate by the age; the root of 1 + age is gentler, and is 1 for fresh samples. The factor is on the
    learning rate and not on the loss, since Adam cancels a factor on the loss."""
    return float((1.0 + age) ** -0.5)

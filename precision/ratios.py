"""Log-ratios between the policy that learns and the engine that sampled, and statistics of them that add up.

    l_t = log pi_learner(y_t) - log pi_engine(y_t),   rho_t = exp(l_t),   y_t sampled by the engine.

`RatioSums` holds sums, maxima and a histogram, so that ranks merge by one all-reduce of each tensor (SUM, MAX, SUM).
`ratio_terms` yields what is summed for each token, for sums over parts of the tokens (precision.mismatch.statistics).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from precision.ess import ess_from_sums
from precision.histogram import LOG_RATIO_EDGES, NUM_LOG_RATIO_BINS
from precision.torch_on_use import Tensor, torch

MAX_LOG_RATIO = 40.0
"""Nats. float32 holds numbers up to e^88. A ratio of e^40 leaves room for its square, for any advantage and for the sum
over a micro-batch. It also means that the two policies have nothing in common: the engine sampled the token with a
probability below 5e-18."""


def masked_log_ratios(learner_logprobs: Tensor, rollout_logprobs: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Log-ratios and ratios, both [batch, sequence] in the logprobs' dtype, with 0 and 1 where `mask` is False.

    The gradient flows through `learner_logprobs`. Raises FloatingPointError when a log-ratio under the mask is not
    finite or above MAX_LOG_RATIO, ValueError when shapes differ.
    """
    log_ratios = masked_differences(learner_logprobs, rollout_logprobs, mask)
    require_usable(log_ratios, f"of {int(mask.sum())} tokens")
    return log_ratios, log_ratios.exp()


def masked_differences(logprobs: Tensor, others: Tensor, mask: Tensor) -> Tensor:
    """log pi - log pi_other, [batch, sequence] in the logprobs' dtype, with 0 where `mask` is False; of any size, for
    what is never made a ratio.

    Both inputs are replaced behind the mask before they are subtracted, so NaN or -inf there reaches neither value nor
    gradient; the gradient flows through `logprobs`. Raises ValueError when shapes differ.
    """
    if not logprobs.shape == others.shape == mask.shape:
        raise ValueError(
            f"shapes differ: logprobs {tuple(logprobs.shape)}, others {tuple(others.shape)}, mask "
            f"{tuple(mask.shape)}; pass one row per sample, padded alike"
        )
    return torch.where(mask, logprobs, 0.0) - torch.where(mask, others, 0.0)


def require_usable(log_ratios: Tensor, among: str) -> None:
    """Raises FloatingPointError unless all `log_ratios`, of any shape, are finite and at most MAX_LOG_RATIO; `among`
    ends the count of those that are not."""
    usable = log_ratios.isfinite() & (log_ratios <= MAX_LOG_RATIO)
    if not bool(usable.all()):
        worst = log_ratios.detach()[~usable]
        raise FloatingPointError(
            f"{worst.numel()} {among} have an unusable log-ratio, the first {float(worst[0])}; expected finite and at "
            f"most {MAX_LOG_RATIO:g}; compare the learner's and the engine's logprobs"
        )


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
"""What is summed over tokens, in this order. `k3` is rho - 1 - l and `ratio_above_one` is max(rho, 1/rho)."""
_PLACE = {name: place for place, name in enumerate(SUMS)}
_LEAST_SPREAD = 1e-12
"""Of a mean square: where a variance is less, float64 sums have not kept it, and a correlation would be noise."""


def ratio_terms(learner_logprobs: Tensor, rollout_logprobs: Tensor) -> Tensor:
    """float64 [tokens, len(SUMS)] of what each token adds; both inputs are float64 [tokens], nats, already checked.

    Every term is finite: 1/rho is cut at e^MAX_LOG_RATIO, and a probability at 1.
    """
    log_ratios = learner_logprobs - rollout_logprobs
    ratios = log_ratios.exp()
    learner, rollout = (each.clamp(max=0.0).exp() for each in (learner_logprobs, rollout_logprobs))
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
    """int64, shaped as the float64 `log_ratios`: the bin of each in the histogram of LOG_RATIO_EDGES."""
    edges = torch.tensor(LOG_RATIO_EDGES, dtype=torch.float64, device=log_ratios.device)
    return torch.bucketize(log_ratios, edges, right=True)


@dataclass(frozen=True)
class RatioSums:
    """Additive statistics of log-ratios; all tensors float64 on one device.

    Ratios are importance weights of the engine's samples. So every mean below is an expectation under the engine's
    policy.
    """

    sums: Tensor
    """[len(SUMS)] All-reduce with SUM."""
    maxima: Tensor
    """[2] max l and max -l; -inf without tokens. All-reduce with MAX."""
    histogram: Tensor
    """[NUM_LOG_RATIO_BINS] tokens by l, edges LOG_RATIO_EDGES. All-reduce with SUM."""

    @classmethod
    def zero(cls, device: torch.device | None = None) -> RatioSums:
        """Of no tokens: what changes nothing when ranks are merged."""
        return cls(
            sums=torch.zeros(len(SUMS), dtype=torch.float64, device=device),
            maxima=torch.full((2,), -math.inf, dtype=torch.float64, device=device),
            histogram=torch.zeros(NUM_LOG_RATIO_BINS, dtype=torch.float64, device=device),
        )

    @classmethod
    def from_logprobs(cls, learner_logprobs: Tensor, rollout_logprobs: Tensor, mask: Tensor) -> RatioSums:
        """Statistics of the tokens under `mask`; all three are [batch, sequence], logprobs in nats, mask bool.

        Differences are taken in float64. Raises as `masked_log_ratios`.
        """
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

    @property
    def ess(self) -> float:
        """Token ESS of P3O, in [1/num_tokens, 1]; see `precision.ess`."""
        return ess_from_sums(self._sum("ratio"), self._sum("ratio_squared"), self.num_tokens)

    @property
    def chi2(self) -> float:
        """chi^2(learner || engine) = E[rho^2] - 1; from finite samples it may come out below 0."""
        return self.mean("ratio_squared") - 1.0

    @property
    def k3_kl(self) -> float:
        """KL(engine || learner) in nats: mean of rho - 1 - log rho (k3 of joschu.net/blog/kl-approx.html), which is
        unbiased and never negative for samples from the engine, as ours are."""
        return self.mean("k3")

    @property
    def ratio_mean(self) -> float:
        """E[rho], 1 in expectation when the engine's support covers the learner's."""
        return self.mean("ratio")

    @property
    def mean_log_ratio(self) -> float:
        """Nats. The signed gap: above 0 the learner finds the tokens more likely than the engine did."""
        return self.mean("log_ratio")

    @property
    def k1_kl(self) -> float:
        """KL(engine || learner) in nats: mean of -log rho, unbiased, of either sign."""
        return -self.mean("log_ratio")

    @property
    def k2_kl(self) -> float:
        """KL(engine || learner) in nats: mean of (log rho)^2 / 2, biased, of low variance."""
        return self.mean("log_ratio_squared") / 2.0

    @property
    def mean_abs_log_ratio(self) -> float:
        """Nats."""
        return self.mean("log_ratio_abs")

    @property
    def max_abs_log_ratio(self) -> float:
        """Nats."""
        return float(self._extremes().max())

    @property
    def max_ratio(self) -> float:
        return math.exp(float(self._extremes()[0]))

    @property
    def min_ratio(self) -> float:
        return math.exp(-float(self._extremes()[1]))

    @property
    def probability_error(self) -> float:
        """Mean of max(rho, 1/rho), at least 1: NeMo-RL's `token_mult_prob_error`."""
        return self.mean("ratio_above_one")

    @property
    def logprob_pearson(self) -> float | None:
        """Correlation of the two sides' log-probabilities; None where either hardly varies."""
        return self._pearson("logprob")

    @property
    def probability_pearson(self) -> float | None:
        """Correlation of the two sides' probabilities, as verl logs it; None where either hardly varies."""
        return self._pearson("probability")

    def statistics(self) -> dict[str, float]:
        """All of them under the names that metrics use; correlations that are undefined are left out. Raises ValueError
        without tokens."""
        found: dict[str, float | None] = {
            "ess": self.ess,
            "chi2": self.chi2,
            "k1_kl": self.k1_kl,
            "k2_kl": self.k2_kl,
            "k3_kl": self.k3_kl,
            "log_ratio_mean": self.mean_log_ratio,
            "log_ratio_abs_mean": self.mean_abs_log_ratio,
            "ratio_mean": self.ratio_mean,
            "ratio_max": self.max_ratio,
            "ratio_min": self.min_ratio,
            "ratio_above_2_share": self.mean("ratio_above_2"),
            "ratio_below_half_share": self.mean("ratio_below_half"),
            "ratio_above_10_share": self.mean("ratio_above_10"),
            "ratio_below_tenth_share": self.mean("ratio_below_tenth"),
            "probability_error": self.probability_error,
            "probability_gap_abs_mean": self.mean("probability_gap_abs"),
            "logprob_pearson": self.logprob_pearson,
            "probability_pearson": self.probability_pearson,
            "num_tokens": float(self.num_tokens),
        }
        return {name: value for name, value in found.items() if value is not None}

    def mean(self, name: str) -> float:
        """Mean over the tokens of one of SUMS."""
        self._require_tokens()
        return self._sum(name) / self.num_tokens

    def _sum(self, name: str) -> float:
        return float(self.sums[_PLACE[name]])

    def _pearson(self, what: str) -> float | None:
        learner, rollout = self.mean(f"learner_{what}"), self.mean(f"rollout_{what}")
        squares = self.mean(f"learner_{what}_squared"), self.mean(f"rollout_{what}_squared")
        variances = squares[0] - learner**2, squares[1] - rollout**2
        if any(variance <= _LEAST_SPREAD * square for variance, square in zip(variances, squares, strict=True)):
            return None
        covariance = self.mean(f"{what}_product") - learner * rollout
        return max(-1.0, min(1.0, covariance / math.sqrt(variances[0] * variances[1])))

    def _extremes(self) -> Tensor:
        self._require_tokens()
        return self.maxima

    def _require_tokens(self) -> None:
        if self.num_tokens < 1:
            raise ValueError("ratio statistics of 0 tokens are undefined, expected at least 1; check the mask")

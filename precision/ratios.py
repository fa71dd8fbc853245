"""Log-ratios between the policy that learns and the engine that sampled, and statistics of them that add up.

    l_t = log pi_learner(y_t) - log pi_engine(y_t),   rho_t = exp(l_t),   y_t sampled by the engine.

`RatioSums` holds sums, maxima and a histogram, so that ranks merge by one all-reduce of each tensor (SUM, MAX, SUM).
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

    Both inputs are replaced behind the mask before they are subtracted, so NaN or -inf there reaches neither value nor
    gradient; the gradient flows through `learner_logprobs`. Raises FloatingPointError when a log-ratio under the mask
    is not finite or above MAX_LOG_RATIO, ValueError when shapes differ.
    """
    if not learner_logprobs.shape == rollout_logprobs.shape == mask.shape:
        raise ValueError(
            f"shapes differ: learner {tuple(learner_logprobs.shape)}, rollout {tuple(rollout_logprobs.shape)}, mask "
            f"{tuple(mask.shape)}; pass one row per sample, padded alike"
        )
    log_ratios = torch.where(mask, learner_logprobs, 0.0) - torch.where(mask, rollout_logprobs, 0.0)
    require_usable(log_ratios, f"of {int(mask.sum())} tokens")
    return log_ratios, log_ratios.exp()


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


@dataclass(frozen=True)
class RatioSums:
    """Additive statistics of log-ratios; all tensors float64 on one device.

    Ratios are importance weights of the engine's samples. So every mean below is an expectation under the engine's
    policy.
    """

    sums: Tensor
    """[6] num_tokens, sum rho, sum rho^2, sum l, sum |l|, sum (rho - 1 - l). All-reduce with SUM."""
    maxima: Tensor
    """[2] max l and max -l; -inf without tokens. All-reduce with MAX."""
    histogram: Tensor
    """[NUM_LOG_RATIO_BINS] tokens by l, edges LOG_RATIO_EDGES. All-reduce with SUM."""

    @classmethod
    def zero(cls, device: torch.device | None = None) -> RatioSums:
        """Of no tokens: what changes nothing when ranks are merged."""
        return cls(
            sums=torch.zeros(6, dtype=torch.float64, device=device),
            maxima=torch.full((2,), -math.inf, dtype=torch.float64, device=device),
            histogram=torch.zeros(NUM_LOG_RATIO_BINS, dtype=torch.float64, device=device),
        )

    @classmethod
    def from_logprobs(cls, learner_logprobs: Tensor, rollout_logprobs: Tensor, mask: Tensor) -> RatioSums:
        """Statistics of the tokens under `mask`; all three are [batch, sequence], logprobs in nats, mask bool.

        Differences are taken in float64. Raises as `masked_log_ratios`.
        """
        padded, _ = masked_log_ratios(learner_logprobs.detach().double(), rollout_logprobs.double(), mask)
        log_ratios = padded[mask]
        if not log_ratios.numel():
            return cls.zero(log_ratios.device)
        ratios = log_ratios.exp()
        # expm1 keeps the digits that rho - 1 loses when the two sides nearly agree.
        k3 = torch.expm1(log_ratios) - log_ratios
        terms = (torch.ones_like(ratios), ratios, ratios.square(), log_ratios, log_ratios.abs(), k3)
        edges = torch.tensor(LOG_RATIO_EDGES, dtype=torch.float64, device=log_ratios.device)
        bins = torch.bucketize(log_ratios, edges, right=True)
        return cls(
            sums=torch.stack([term.sum() for term in terms]),
            maxima=torch.stack([log_ratios.max(), (-log_ratios).max()]),
            histogram=torch.bincount(bins, minlength=NUM_LOG_RATIO_BINS).double(),
        )

    @property
    def num_tokens(self) -> int:
        return int(self.sums[0])

    @property
    def ess(self) -> float:
        """Token ESS of P3O, in [1/num_tokens, 1]; see `precision.ess`."""
        return ess_from_sums(float(self.sums[1]), float(self.sums[2]), self.num_tokens)

    @property
    def chi2(self) -> float:
        """chi^2(learner || engine) = E[rho^2] - 1; from finite samples it may come out below 0."""
        return self._mean(2) - 1.0

    @property
    def k3_kl(self) -> float:
        """KL(engine || learner) in nats: mean of rho - 1 - log rho (k3 of joschu.net/blog/kl-approx.html), which is
        unbiased and never negative for samples from the engine, as ours are."""
        return self._mean(5)

    @property
    def ratio_mean(self) -> float:
        """E[rho], 1 in expectation when the engine's support covers the learner's."""
        return self._mean(1)

    @property
    def mean_log_ratio(self) -> float:
        """Nats; minus this is the plain (k1) estimate of KL(engine || learner)."""
        return self._mean(3)

    @property
    def mean_abs_log_ratio(self) -> float:
        """Nats."""
        return self._mean(4)

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

    def statistics(self) -> dict[str, float]:
        """All of them under the names that metrics use. Raises ValueError without tokens."""
        return {
            "ess": self.ess,
            "chi2": self.chi2,
            "k3_kl": self.k3_kl,
            "log_ratio_mean": self.mean_log_ratio,
            "log_ratio_abs_mean": self.mean_abs_log_ratio,
            "ratio_mean": self.ratio_mean,
            "ratio_max": self.max_ratio,
            "ratio_min": self.min_ratio,
            "num_tokens": float(self.num_tokens),
        }

    def _mean(self, index: int) -> float:
        self._require_tokens()
        return float(self.sums[index] / self.sums[0])

    def _extremes(self) -> Tensor:
        self._require_tokens()
        return self.maxima

    def _require_tokens(self) -> None:
        if self.num_tokens < 1:
            raise ValueError("ratio statistics of 0 tokens are undefined, expected at least 1; check the mask")

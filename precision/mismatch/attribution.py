"""Split a token's log-ratio between learner and engine into a sum of terms, each with a cause and statistics.

A token was sampled by an engine at policy version v and is trained on with weights theta. Between the learner's
log-probability and the engine's lie others of the same token, each of which differs from the one before in one thing:

    learner at theta                        now
      - learner at v                        then        staleness
      - … with the rollout's formats        quantized   quantization
      - … with the engine's experts         routed      routing (mixtures only)
      - engine at v, prefilled              prefill     kernels
      - engine at v, as it sampled          decode      decoding

    log pi_now - log pi_decode = staleness + quantization + routing + kernels + decoding

The sum telescopes: it is an identity, token by token, and no model of the mismatch. The last term holds what the
sampler does otherwise (KV cache, batching, temperature). A score that was not taken is None; its term is exactly 0, and
its difference goes to the next term. `suspects` names the fault that explains a term best.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from precision.mismatch.statistics import quantiles
from precision.ratios import MAX_LOG_RATIO, ess_from_sums
from precision.torch_on_use import Tensor, torch

TERMS = ("staleness", "quantization", "routing", "kernels", "decoding")
"""Names of the terms, from the learner to the engine."""

QUANTILES = (0.001, 0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99, 0.999)


@dataclass(frozen=True, kw_only=True)
class TokenScores:
    """Natural log-probabilities of the same sampled tokens, each float64 [tokens]; None where not scored."""

    now: Tensor
    """By the learner at the weights that are trained."""
    then: Tensor | None = None
    """By the learner at the version that sampled."""
    quantized: Tensor | None = None
    """As `then`, with the rollout's formats emulated; None: nothing is quantized, or it cannot be emulated."""
    routed: Tensor | None = None
    """As `quantized`, with the experts that the engine chose; None: a dense model, or they are not known."""
    prefill: Tensor | None = None
    """By the engine, all tokens of a row at once."""
    decode: Tensor
    """By the engine, as it sampled the token."""

    def __post_init__(self) -> None:
        scores = (self.now, self.then, self.quantized, self.routed, self.prefill, self.decode)
        known = [score for score in scores if score is not None]
        shapes = {tuple(score.shape) for score in known}
        if len(shapes) != 1 or known[0].dim() != 1 or not known[0].numel():
            raise ValueError(f"scores are of shapes {sorted(shapes)}, expected one [tokens] with tokens; score one set")
        if any(score.dtype is not torch.float64 for score in known):
            raise ValueError("scores are not float64, and differences of rounded numbers do not add up; use .double()")

    @property
    def total(self) -> Tensor:
        """Log-ratio log pi_now - log pi_decode [tokens], nats, which an objective sees."""
        return self.now - self.decode

    def terms(self) -> dict[str, Tensor]:
        """Return each of TERMS, [tokens], nats; they add up to `total`. Raises FloatingPointError naming a term with
        values that are not finite. Large values are allowed, since an attribution is to find them."""
        terms, upper = {}, self.now
        chain = (self.then, self.quantized, self.routed, self.prefill, self.decode)
        for name, lower in zip(TERMS, chain, strict=True):
            terms[name] = torch.zeros_like(upper) if lower is None else upper - lower
            upper = upper if lower is None else lower
            if not bool(terms[name].isfinite().all()):
                raise FloatingPointError(
                    f"{int((~terms[name].isfinite()).sum())} tokens of the term {name} are not finite; compare the "
                    "learner's and the engine's logprobs"
                )
        return terms


@dataclass(frozen=True, kw_only=True)
class TermStatistics:
    """Statistics of one term over all tokens, as if it were the whole mismatch. In nats where nothing else is given."""

    mean: float
    mean_abs: float
    max_abs: float
    share: float
    """E[term · total] / E[total²]; 0 where the total is 0 for every token. The shares of all terms add up to 1. A term
    that cancels others has a share below 0."""
    ess: float
    """Token ESS of exp(term), in [1/tokens, 1] (precision.ratios). Here and in `k3`, terms are cut at MAX_LOG_RATIO."""
    k3: float
    """Mean of exp(term) - 1 - term (precision.ratios). A KL divergence for the total, a size for a term."""
    positive_share: float
    """Share of tokens to which the learner's side gives more probability."""
    mean_positive: float
    """Mean of max(term, 0) over all tokens."""
    mean_negative: float
    """Mean of min(term, 0) over all tokens."""
    quantiles: Mapping[str, float]
    """Exact quantiles, by their order in percent: "0.1" to "99.9"."""


@dataclass(frozen=True, kw_only=True)
class Attribution:
    num_tokens: int
    total: TermStatistics
    terms: Mapping[str, TermStatistics]
    largest_error: float
    """Largest |sum of terms - total| of a token, nats: rounding of float64 alone."""


def attribute(scores: TokenScores) -> Attribution:
    """Return statistics of each term and of the total. Raises as `TokenScores.terms`."""
    terms, total = scores.terms(), scores.total
    summed = torch.stack(list(terms.values())).sum(dim=0)
    return Attribution(
        num_tokens=total.numel(),
        total=term_statistics(total, total),
        terms={name: term_statistics(term, total) for name, term in terms.items()},
        largest_error=float((summed - total).abs().max()),
    )


def term_statistics(term: Tensor, total: Tensor) -> TermStatistics:
    """Return statistics of one term beside the total, both float64 [tokens]."""
    capped = term.clamp(max=MAX_LOG_RATIO)
    ratios = capped.exp()
    power = float(total.square().sum())
    values = quantiles([term.sort().values], QUANTILES)[0].tolist()
    return TermStatistics(
        mean=float(term.mean()),
        mean_abs=float(term.abs().mean()),
        max_abs=float(term.abs().max()),
        share=float((term * total).sum()) / power if power else 0.0,
        ess=ess_from_sums(float(ratios.sum()), float(ratios.square().sum()), term.numel()),
        k3=float((torch.expm1(capped) - capped).mean()),
        positive_share=float((term > 0).double().mean()),
        mean_positive=float(term.clamp(min=0).mean()),
        mean_negative=float(term.clamp(max=0).mean()),
        quantiles={f"{100 * order:g}": value for order, value in zip(QUANTILES, values, strict=True)},
    )


def by_bucket(terms: Mapping[str, Tensor], bucket: Tensor, num_buckets: int) -> dict[str, list[float]]:
    """Return term → mean absolute value in nats for each bucket, NaN without tokens; `bucket` is int64 [tokens]."""
    counts = torch.bincount(bucket, minlength=num_buckets).double()
    return {
        name: [
            total / count if count else math.nan
            for total, count in zip(
                torch.bincount(bucket, weights=term.abs(), minlength=num_buckets).tolist(),
                counts.tolist(),
                strict=True,
            )
        ]
        for name, term in terms.items()
    }


TRIED_SCALE = 1.1
"""Wrong scale that is tried: small enough that another factor has nearly the same effect, times a number."""
LEAST_SCALE = -1.0 / (TRIED_SCALE - 1.0)
"""Amount of this fault at which the scale is 0."""


@dataclass(frozen=True, kw_only=True)
class Suspect:
    name: str
    explained: float
    """Share of the term's sum of squares, in [0, 1]."""
    amount: float
    """Multiple of the fault that was tried."""


def suspects(
    term: Tensor, effects: Mapping[str, Tensor], least: Mapping[str, float] = MappingProxyType({})
) -> list[Suspect]:
    """Return how well each known fault explains a term that should be near zero, the best first.

    A fault of the engine, such as one module with a wrong scale, moves every token's log-probability in its own way.
    The learner computes this effect by scoring the same tokens with the fault in its own weights. A term that the fault
    has caused is, to first order, a multiple of the effect:

        term_t ≈ c · effect_t,   c = <term, effect> / <effect, effect>,   explained = c <term, effect> / <term, term>

    Only the direction of the effect counts, not its size: a scale that is wrong by any small factor is found by the
    effect of 1.1. A negative c is the opposite of the fault. It explains nothing, unless the opposite is possible too:
    a scale may be too small, as long as it is a scale. `least` is the amount that a fault exceeds, where that is not 0.
    `term` and each effect are float64 [tokens], nats. An effect of zero explains nothing, and nothing explains a term
    of zero. Raises ValueError for other shapes.
    """
    power = float(term.square().sum())
    found = []
    for name, effect in effects.items():
        if effect.shape != term.shape:
            raise ValueError(
                f"the effect of {name} has shape {tuple(effect.shape)}, the term {tuple(term.shape)}; score the same "
                "tokens"
            )
        size, overlap = float(effect.square().sum()), float((term * effect).sum())
        known = size > 0 and power > 0
        amount = overlap / size if known else 0.0
        possible = known and amount > least.get(name, 0.0)
        found.append(Suspect(name=name, explained=amount * overlap / power if possible else 0.0, amount=amount))
    return sorted(found, key=lambda suspect: -suspect.explained)

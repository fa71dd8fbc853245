"""From residual streams to what a training step sees: the ESS of tokens that the quantized model samples.

A random head turns the normed stream into logits over a vocabulary. Its size is set so that the reference policy has a
given entropy. Tokens of a trained policy are of two kinds: about a fifth are forks that hold most of the entropy, the
others are nearly certain (arXiv 2506.01939). Only forks can differ much, so what is read here are forks, of
FORK_ENTROPY on average; over all tokens FORK_SHARE of it counts. Both numbers are assumptions.

For tokens of a position that the quantized model q samples, with the learner p, everything is an expectation over the
vocabulary, without sampling error:

    E[rho] = 1,   chi^2 = E[rho^2] - 1 = sum p^2 / q - 1,   KL(q || p) = sum q log(q / p),   gap = E|log rho|

The ESS of a step of many tokens is 1 / (1 + mean chi^2). As E[rho_t | tokens before] = 1, the ratio of a sequence has
E[rho^2] = E[prod (1 + chi^2_t)], and so the ESS of sequences falls with exp(-sum chi^2_t) or faster.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tests.evidence.at_32b.maps import REFERENCE
from tests.evidence.at_32b.stack import Streams, rms_norm
from tests.evidence.at_32b.weights import Weights

VOCABULARY = 4096
FORK_ENTROPY, FORK_SHARE = 1.5, 0.2
"""Nats, and the share of tokens: a mean entropy of 0.3 nats over all tokens."""
ENTROPIES = (0.75, FORK_ENTROPY, 3.0)
POSITIONS_AT_ONCE = 512


@dataclass(frozen=True)
class Head:
    """The same for all depths of a case."""

    weights: Weights

    def matrix(self) -> Tensor:
        hidden = self.weights.sizes.hidden
        return torch.randn(VOCABULARY, hidden, generator=self.weights.generator("head")) / hidden**0.5


def read(streams: Streams, head: Tensor, gains: Tensor) -> dict[str, dict[str, Tensor]]:
    """Map → quantity → [positions]: error (relative, of the stream that the head sees), and chi2, kl, gap of forks at
    each entropy. `gains` are those of the last norm."""
    normed = {name: (rms_norm(hidden) * gains).flatten(0, 1) for name, hidden in streams.items()}
    reference = normed[REFERENCE.name]
    sizes = {entropy: _size(reference[:POSITIONS_AT_ONCE] @ head.T, entropy) for entropy in ENTROPIES}
    found: dict[str, dict[str, Tensor]] = {}
    for name in sorted(streams.keys() - {REFERENCE.name}):
        parts: dict[str, list[Tensor]] = {}
        for ours, theirs in zip(reference.split(POSITIONS_AT_ONCE), normed[name].split(POSITIONS_AT_ONCE), strict=True):
            parts.setdefault("error", []).append((theirs - ours).norm(dim=-1) / ours.norm(dim=-1))
            for entropy, size in sizes.items():
                for quantity, values in _divergences(size * (ours @ head.T), size * (theirs @ head.T)).items():
                    parts.setdefault(f"{quantity}@{entropy}", []).append(values)
        found[name] = {quantity: torch.cat(values) for quantity, values in parts.items()}
    return found


def _divergences(reference: Tensor, quantized: Tensor) -> dict[str, Tensor]:
    log_p, log_q = (part.double().log_softmax(dim=-1) for part in (reference, quantized))
    log_rho, q = log_p - log_q, log_q.exp()
    return dict(
        chi2=torch.expm1(2 * log_rho).mul(q).sum(dim=-1),
        kl=-(q * log_rho).sum(dim=-1),
        gap=(q * log_rho.abs()).sum(dim=-1),
    )


def _size(logits: Tensor, entropy: float) -> float:
    """The factor that gives the reference this mean entropy, by bisection."""
    low, high = 0.0, 64.0
    for _ in range(40):
        middle = (low + high) / 2
        log_p = (middle * logits).log_softmax(dim=-1)
        mean = float(-(log_p.exp() * log_p).sum(dim=-1).mean())
        low, high = (middle, high) if mean > entropy else (low, middle)
    return low

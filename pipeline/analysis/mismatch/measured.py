"""From scores of tokens to an attribution as plain values, ready for JSON, for a page and for a verdict."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from precision.mismatch.attribution import (
    LEAST_SCALE,
    TokenScores,
    attribute,
    by_bucket,
    split_by_layer,
    suspects,
    term_statistics,
)
from precision.mismatch.statistics import SPLITS
from precision.torch_on_use import Tensor, torch

MOST_SUSPECTS = 5


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What was compared, in words that the page prints."""

    source: str
    kind: str
    """fresh or recorded"""
    rollout_precision: str
    learner_precision: str
    engine_dtype: str
    temperature: float
    """Of the learner's policy."""
    sampled_at: float
    """The engine's."""
    versions: tuple[int, ...]
    trains_formats: bool = False
    """Whether the learner trains with the rollout's formats emulated: the quantization term is 0 by construction."""
    remarks: tuple[str, ...] = ()
    """What could not be compared, and why."""


@dataclass(frozen=True, kw_only=True)
class Misheld:
    """A module that the engine holds otherwise than it should (precision.formats.audit.Finding)."""

    module: str
    kind: str
    message: str


@dataclass(frozen=True, kw_only=True)
class Audit:
    """Whether the engine holds what it was given."""

    compared: int
    """Parameters, by their checksums."""
    differing: tuple[str, ...]
    """Those of them whose checksums are others."""
    misheld: tuple[Misheld, ...] = ()
    """By formats, scales and values."""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Everything about one set of sampled tokens; arrays are float64 [tokens] where not said."""

    setting: Setting
    scores: TokenScores
    position: NDArray[np.int64]
    """[tokens] place in the response, from 0."""
    entropy: NDArray[np.float64]
    """Of the learner's distribution at the version that sampled, nats."""
    layer_steps: Mapping[int, NDArray[np.float64]] = field(default_factory=dict)
    """Layer, ascending → log-probabilities with it and those before it in the rollout's formats."""
    searched: NDArray[np.bool_] | None = None
    """[tokens] those on which faults were tried."""
    effects: Mapping[str, NDArray[np.float64]] = field(default_factory=dict)
    """Fault → [searched tokens] what it does (launch.attribution.score_ranks)."""
    audit: Audit

    def result(self) -> dict[str, Any]:
        """JSON values."""
        attribution = attribute(self.scores)
        terms = self.scores.terms()
        return dict(
            **asdict(self.setting),
            num_tokens=attribution.num_tokens,
            total=asdict(attribution.total),
            terms={name: asdict(term) for name, term in attribution.terms.items()},
            measured=self._measured(),
            largest_error=attribution.largest_error,
            layers=self._layers(),
            by_position=self._by("position", self.position.astype(np.float64), terms),
            by_entropy=self._by("entropy", self.entropy, terms),
            audit=asdict(self.audit),
            suspects=self._suspects(terms),
        )

    def _measured(self) -> dict[str, bool]:
        """Which terms were taken, and are not 0 for want of a score."""
        scores = self.scores
        return dict(
            staleness=scores.then is not None,
            quantization=scores.quantized is not None,
            routing=scores.routed is not None,
            kernels=scores.prefill is not None,
            decoding=True,
        )

    def _layers(self) -> list[dict[str, Any]]:
        if not self.layer_steps or self.scores.then is None:
            return []
        steps = [self.scores.then, *map(_tensor, self.layer_steps.values())]
        whole, terms = steps[0] - steps[-1], split_by_layer(steps)
        return [
            dict(layer=layer, **asdict(term_statistics(term, whole)))
            for layer, term in zip(self.layer_steps, terms, strict=True)
        ]

    def _by(self, name: str, values: NDArray[np.float64], terms: Mapping[str, Tensor]) -> dict[str, Any]:
        """Mean |term| in each bucket of one of precision.mismatch.statistics, up to the last that has tokens."""
        split = next(one for one in SPLITS if one.name == name)
        bucket = np.digitize(values, split.edges).astype(np.int64)
        return self._buckets(terms, bucket, split.buckets[: int(bucket.max()) + 1])

    def _buckets(self, terms: Mapping[str, Tensor], bucket: NDArray[np.int64], labels: Sequence[str]) -> dict[str, Any]:
        means = by_bucket({**terms, "total": self.scores.total}, torch.from_numpy(bucket), len(labels))
        return dict(
            labels=list(labels),
            num_tokens=np.bincount(bucket, minlength=len(labels)).tolist(),
            mean_abs={name: [None if math.isnan(v) else v for v in values] for name, values in means.items()},
        )

    def _suspects(self, terms: Mapping[str, Tensor]) -> dict[str, list[dict[str, Any]]]:
        """Faults that would explain the engine's terms, the best first."""
        below = self.scores.then if self.scores.quantized is None else self.scores.quantized
        found = {}
        if below is not None:
            # To first order log p at T is log p - (T - 1)(log p + entropy).
            tempered = {"temperature": below + _tensor(self.entropy)}
            found["decoding"] = suspects(terms["decoding"], tempered, {"temperature": -1.0})
        if self.searched is not None and self.effects:
            kernels = terms["kernels"]
            if self.scores.prefill is None:  # then the decoding term holds them
                kernels = kernels + terms["decoding"]
            kernels = kernels[torch.from_numpy(self.searched)]
            tried = {name: _tensor(effect) for name, effect in self.effects.items()}
            found["kernels"] = suspects(
                kernels, tried, {name: LEAST_SCALE for name in tried if name.startswith("scale:")}
            )
        return {term: [asdict(one) for one in every[:MOST_SUSPECTS]] for term, every in found.items()}


def _tensor(values: NDArray[np.float64]) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(values, np.float64))

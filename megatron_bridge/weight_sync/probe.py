"""The probe of a publish: how the learner scores a few fixed tokens, and what that says about the mismatch.

Engines are verified by it (pipeline.ports.weights). The same scores give a small attribution at every publish:

    staleness      the present weights against those of the publish before: what one publish moves
    quantization   the learner plainly against the learner with the rollout's formats emulated
    kernels        that against the engine; the verifier measures it (rollout_sglang.weight_verifier)

The tokens are random, so these figures follow a change and are not the mismatch of what is trained on. That is
`evenkeel mismatch`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megatron_bridge.step.fp8_emulation import emulated
from pipeline.ports.weights import Probe
from precision.formats.quant_map import QuantMap
from precision.mismatch.statistics import gap

if TYPE_CHECKING:
    from megatron_bridge.learner import MegatronLearner

Scores = list[NDArray[np.float32]]


class ProbeScorer:
    """Scores the probe's rows, and remembers what they were at the publish before."""

    def __init__(self, learner: MegatronLearner) -> None:
        self._learner = learner
        self._former: Scores | None = None

    def score(
        self, rows: tuple[tuple[int, ...], ...], max_mean_gap_nats: float, quant: QuantMap | None
    ) -> tuple[Probe, dict[str, float]]:
        """The probe at the present weights, and probe_staleness_nats (from the second publish on),
        probe_quantization_nats (mean absolute) and probe_quantization_ess, where they can be known. Collective.

        Formats are emulated in Megatron's own layers alone. It costs a rounding of the quantized weights and one pass.
        """
        plain = self._learner.score_tokens(rows, temperature=1.0)
        quantized = self._quantized(rows, plain, quant)
        measured: dict[str, float] = {}
        if self._former is not None:
            measured["probe_staleness_nats"] = gap(_flat(plain), _flat(self._former)).mean_abs
        if quantized is not None and quantized is not plain:
            formats = gap(_flat(plain), _flat(quantized))
            measured |= {"probe_quantization_nats": formats.mean_abs, "probe_quantization_ess": formats.ess}
        self._former = plain
        probe = Probe(
            rows=rows,
            logprobs=_values(plain),
            quantized=() if quantized is None else _values(quantized),
            max_mean_gap_nats=max_mean_gap_nats,
        )
        return probe, measured

    def _quantized(self, rows: Sequence[Sequence[int]], plain: Scores, quant: QuantMap | None) -> Scores | None:
        """`plain` itself where the learner computes as the map says already; None where it cannot."""
        if quant is None or not quant.formats or self._learner.emulation is not None:
            return plain
        if self._learner.layers != "megatron":
            return None
        with emulated(self._learner, quant):
            return self._learner.score_tokens(rows, temperature=1.0)


def _flat(scores: Scores) -> Tensor:
    return torch.from_numpy(np.concatenate(scores).astype(np.float64))


def _values(scores: Scores) -> tuple[tuple[float, ...], ...]:
    return tuple(tuple(row.tolist()) for row in scores)

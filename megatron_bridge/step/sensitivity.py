"""Scores of fixed token rows under any quant map, by a running learner, as `precision.mismatch.sensitivity` asks."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from torch import Tensor

from megatron_bridge.step.fp8_emulation import emulated
from megatron_bridge.step.micro_batches import TokenRows
from precision.formats.quant_map import QuantMap

if TYPE_CHECKING:
    from megatron_bridge.learner import MegatronLearner


def row_scorer(learner: MegatronLearner, rows: TokenRows) -> Callable[[QuantMap | None], Tensor]:
    """`score(quant_map)` → [tokens] float64, nats: the predicted tokens of each row, one row after another, with the
    map's formats emulated (None, or a map of no modules: without).

    Collective at every call: all ranks must ask for the same maps in the same order. Scores are the same on all ranks,
    so that what is decided from them is. Raises as `emulated`.
    """

    def score(quant_map: QuantMap | None) -> Tensor:
        # None is plain scoring also in a learner that trains with formats emulated.
        with emulated(learner, quant_map if quant_map is not None and quant_map.formats else None):
            return learner.score_rows(rows).logprobs.double().cpu()

    return score

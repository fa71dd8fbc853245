"""The port of the ESS controller to what the rollout's formats do to a batch: implemented by `launch.build.control`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from pipeline.data.batch import Batch


class QuantizationMeter(Protocol):
    """Measures on tokens of a batch, at the learner's present weights. Every method is collective and returns the same
    on all ranks."""

    def term(self, batch: Batch, promoted: Sequence[str]) -> float | None:
        """-ln of the token ESS of the learner against itself with the engines' formats emulated, where the groups
        `promoted` are not quantized. None where the learner cannot emulate."""
        ...

    def groups(self, batch: Batch, names: Sequence[str]) -> dict[str, float] | None:
        """The same for each of some groups as the only one that is quantized. None where the learner cannot emulate."""
        ...

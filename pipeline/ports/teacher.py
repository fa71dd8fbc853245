"""The port of the collector to a teacher of on-policy distillation: implemented by `rollout_sglang.teacher`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray


class Teacher(Protocol):
    """A model that scores tokens which it did not sample."""

    async def logprobs(self, prompt: Sequence[int], responses: Sequence[Sequence[int]]) -> list[NDArray[np.float32]]:
        """For each response to `prompt`, [tokens] natural log-probabilities at temperature 1. Raises RetryableError
        when no server could answer."""
        ...

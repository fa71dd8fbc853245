"""Which tokens of a batch the learner has looked at.

A sample that is left out of an optimizer step (advantage.zero_variance, advantage.truncated) need not meet the learner.
Where the learner has no log-probability of a token, NaN stands in its place, in an Update as in RUN/logprobs.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from pipeline.data.batch import Batch


def looked_at(batch: Batch, learner_logprobs: NDArray[np.float32]) -> NDArray[np.bool_]:
    """bool [responses]: the tokens that an engine sampled and the learner has a log-probability of, be it infinite.
    `learner_logprobs` is [responses], natural log."""
    return np.asarray(batch.loss_mask & ~np.isnan(learner_logprobs))

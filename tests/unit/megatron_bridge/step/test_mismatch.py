"""Ages over the updates of a batch; the statistics themselves are compared in tests/integration."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from megatron_bridge.step.mismatch import MismatchMeter
from megatron_bridge.step.passes import Gathered
from tests.support.batches import batch_of_rewards


def ages(meter: MismatchMeter, batch_index: int, step: int) -> list[str]:
    """The buckets of age that hold tokens of a batch, half of which was sampled by the version before it."""
    batch = batch_of_rewards([[1.0, 0.0]], index=batch_index)
    version = np.full(batch.num_response_tokens, batch_index, np.int32)
    version[::2] -= 1
    batch = replace(batch, policy_version=version)
    gathered = Gathered(
        logprobs=torch.from_numpy(batch.rollout_logprobs), entropy=torch.zeros(batch.num_response_tokens)
    )
    seen = torch.ones(batch.num_response_tokens, dtype=torch.bool)
    return list(meter(gathered, batch, batch.reward, seen, step=step).by_split()["age"])


def test_the_second_update_on_a_batch_sees_older_tokens() -> None:
    meter = MismatchMeter()
    assert ages(meter, 7, step=14) == ["0", "1"]
    assert ages(meter, 7, step=15) == ["1", "2"]
    assert ages(meter, 7, step=16) == ["1", "2"]
    assert ages(meter, 8, step=17) == ["0", "1"]


def test_a_batch_that_is_trained_again_after_a_resume_begins_anew() -> None:
    meter = MismatchMeter()
    assert ages(meter, 7, step=14) == ["0", "1"]
    assert ages(meter, 7, step=14) == ["0", "1"]


def test_one_advantage_too_many_is_refused() -> None:
    batch = batch_of_rewards([[1.0, 0.0]])
    gathered = Gathered.empty(batch.num_response_tokens, "cpu")
    seen = torch.ones(batch.num_response_tokens, dtype=torch.bool)
    with pytest.raises(ValueError, match="give one for each sample or one for each token"):
        MismatchMeter()(gathered, batch, np.zeros(1, np.float32), seen, step=0)

"""A batch of given rows is as valid as a sampled one."""

from __future__ import annotations

import pytest

from pipeline.data.batch import LogprobContract, Response, given_batch
from pipeline.data.batch_format import check_batch


def test_given_rows_lie_in_the_batch_as_if_sampled_with_its_version(contract: LogprobContract) -> None:
    groups = [
        ([1, 2], [Response([3, 4], [-0.5, -0.25], 1.0), Response([5], [-1.0], 0.0)]),
        ([6], [Response([7, 8], [-2.0, -3.0], 0.5)]),
    ]
    batch = given_batch(4, groups, contract)
    check_batch(batch)
    assert [batch.sample_tokens(sample).tolist() for sample in range(3)] == [[1, 2, 3, 4], [1, 2, 5], [6, 7, 8]]
    assert (batch.group.tolist(), batch.next_group) == ([0, 0, 1], 2)
    assert batch.rollout_logprobs.tolist() == [-0.5, -0.25, -1.0, -2.0, -3.0]
    assert batch.policy_version.tolist() == [4] * 5
    assert batch.reward.tolist() == pytest.approx([1.0, 0.0, 0.5])
    assert batch.loss_mask.all()

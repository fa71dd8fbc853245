"""One value for each response token of a batch, [responses], in the batch's flat order."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megatron_bridge.step.passes import Gathered
from pipeline.data.batch import Batch


def by_token(batch: Batch, advantages: NDArray[np.float32]) -> NDArray[np.float32]:
    """[responses] of one advantage a sample, or one a token. Raises ValueError on any other number of them."""
    if len(advantages) == batch.num_samples:
        advantages = np.repeat(advantages, batch.response_lengths)
    elif len(advantages) != batch.num_response_tokens:
        raise ValueError(
            f"{len(advantages)} advantages for {batch.num_samples} samples and {batch.num_response_tokens} "
            "response tokens; give one for each sample or one for each token"
        )
    return np.asarray(advantages, np.float32)


def seen_tokens(batch: Batch, trained: NDArray[np.bool_] | None) -> Tensor:
    """bool [responses]: sampled tokens of the samples that were run through the model."""
    seen = batch.loss_mask
    return torch.from_numpy(seen if trained is None else seen & np.repeat(trained, batch.response_lengths))


def known_logprobs(
    gathered: Gathered,
    batch: Batch,
    trained: NDArray[np.bool_] | None,
    scored: Tensor | NDArray[np.float32] | None,
) -> Tensor:
    """float32 [responses], on the device, at the weights before the step; NaN where neither pass looked."""
    found = gathered.logprobs
    if trained is None:
        return found
    looked = torch.from_numpy(np.repeat(trained, batch.response_lengths)).to(found.device)
    return torch.where(looked, found, torch.as_tensor(torch.nan if scored is None else scored, device=found.device))

"""What a micro-batch tells Megatron's layers of its rows."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from megatron_bridge.step.micro_batches import MicroBatch
from megatron_bridge.step.passes import packed_rows


def of_rows(*lengths: int) -> MicroBatch:
    none = torch.zeros(1, 0, dtype=torch.int64)
    ends = torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32)
    return MicroBatch(tokens=none, labels=none, columns=none[0], index=none[0], row_ends=ends, places=np.zeros(0, int))


@pytest.mark.parametrize(
    ("longest", "told"), [(1, 128), (128, 128), (129, 256), (1024, 1024), (1025, 1280), (5000, 5120), (8191, 8192)]
)
def test_transformer_engine_meets_few_longest_rows(longest: int, told: int) -> None:
    """Rotations of each are cached; attention takes it as a bound. Megatron's own layers get the number itself."""
    on_host = of_rows(longest, 1)
    on_device = replace(on_host, row_ends=on_host.row_ends.clone())
    config: Any = SimpleNamespace(transformer_impl="transformer_engine")
    packed = packed_rows(on_host, on_device, config)
    assert (packed.max_seqlen_q, packed.max_seqlen_kv) == (told, told)
    assert packed.cu_seqlens_q is on_device.row_ends
    config.transformer_impl = "local"
    packed = packed_rows(on_host, on_device, config)
    assert packed.max_seqlen_q == longest
    assert packed.cu_seqlens_q is on_host.row_ends

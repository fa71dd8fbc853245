"""What a save copies, and what it keeps."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor

from megatron_bridge.checkpoint.beside_training import ShardSave, storages_of


def test_only_what_training_changes_is_copied_and_nothing_is_kept_twice() -> None:
    """Megatron-Core's writer keeps its buckets until all ranks have written."""
    live, private = torch.zeros(4), torch.ones(3)
    state = {"a": [ShardedTensor.from_rank_offsets("a", live)], "b": 7}
    buckets = [("path", "key", ([], [("live", live[:2].view(2, 1)), ("private", private)]))]
    written: list[Any] = []
    request = SimpleNamespace(
        preload_fn=lambda: [(path, key, (texts, list(tensors))) for path, key, (texts, tensors) in buckets],
        async_fn=lambda rank, given, results: written.extend(given),
        async_fn_args=[0, buckets, None],
        async_fn_kwargs={},
        finalize_fns=[],
    )
    save = ShardSave(request, lambda says: says(), in_training=storages_of(state))
    live += 1
    while not save.advance(3.0):
        pass
    ((path, key, (texts, tensors)),) = written
    assert (path, key, texts) == ("path", "key", [])
    (_, first), (_, second) = tensors
    assert torch.equal(first, torch.zeros(2, 1))
    assert second is private
    assert buckets == [("path", "key", ([], []))]

"""How groups with engines are made."""

from __future__ import annotations

import os
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from megatron_bridge.weight_sync import process_groups
from megatron_bridge.weight_sync.process_groups import _ERROR_HANDLING


@pytest.mark.parametrize("before", [None, "3"])
def test_groups_with_several_engines_are_made_at_once(monkeypatch: pytest.MonkeyPatch, before: str | None) -> None:
    """Each under our handling of errors, and none leaves it behind. A double stands for NCCL, which a CPU lacks."""
    seen: list[str | None] = []

    class ProcessGroupNCCL:
        Options = SimpleNamespace

        def __init__(self, *_: object) -> None:
            time.sleep(0.02)  # the other threads are here, or want to be
            seen.append(os.environ.get(_ERROR_HANDLING))

    monkeypatch.setattr(dist, "ProcessGroupNCCL", ProcessGroupNCCL, raising=False)
    monkeypatch.delenv(_ERROR_HANDLING, raising=False)
    if before is not None:
        monkeypatch.setenv(_ERROR_HANDLING, before)
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(lambda _: process_groups._backend("nccl", None, 2, 0.0), range(4)))
    assert seen == ["0"] * 4
    assert os.environ.get(_ERROR_HANDLING) == before

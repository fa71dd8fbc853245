"""What is in a snapshot stays, whatever is trained; and who reads it before its end waits."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import Tensor

from megatron_bridge.weight_sync.snapshot import HostSnapshot
from pipeline.background import in_background


def taken(snapshot: HostSnapshot, **tensors: Tensor) -> dict[str, list[float]]:
    snapshot.begin()
    for name, tensor in tensors.items():
        snapshot.add(name, tensor)
    snapshot.end()
    return {name: tensor.tolist() for name, tensor in snapshot}


def test_a_change_of_the_weights_does_not_reach_it() -> None:
    snapshot, weight = HostSnapshot(pinned=False), torch.ones(2)
    assert taken(snapshot, a=weight) == {"a": [1, 1]}
    weight.zero_()
    assert {name: tensor.tolist() for name, tensor in snapshot} == {"a": [1, 1]}


def test_memory_is_used_again_where_it_fits() -> None:
    snapshot = HostSnapshot(pinned=False)
    assert taken(snapshot, a=torch.ones(2), b=torch.ones(3)) == {"a": [1, 1], "b": [1, 1, 1]}
    first = dict(snapshot)
    assert taken(snapshot, b=torch.zeros(1), a=torch.zeros(2)) == {"b": [0], "a": [0, 0]}
    assert dict(snapshot)["a"].data_ptr() == first["a"].data_ptr()
    assert first["b"].tolist() == [1, 1, 1]


def test_readers_follow_it_as_it_grows() -> None:
    snapshot, seen = HostSnapshot(pinned=False), threading.Event()
    snapshot.begin()

    def read() -> list[str]:
        names = []
        for name, _ in snapshot:
            names.append(name)
            seen.set()
        return names

    readers = [in_background(read, "reader") for _ in range(2)]
    snapshot.add("a", torch.ones(1))
    assert seen.wait(10), "before the snapshot is complete"
    snapshot.add("b", torch.ones(1))
    snapshot.end()
    assert [reader.result() for reader in readers] == [["a", "b"]] * 2


def test_what_ended_it_is_raised_by_every_reader() -> None:
    snapshot = HostSnapshot(pinned=False)
    snapshot.begin()
    snapshot.add("a", torch.ones(1))
    waiting = in_background(snapshot.wait, "reader")
    snapshot.end(ValueError("broken"))
    with pytest.raises(ValueError, match="broken"):
        waiting.result()
    assert taken(snapshot, b=torch.ones(1)) == {"b": [1]}

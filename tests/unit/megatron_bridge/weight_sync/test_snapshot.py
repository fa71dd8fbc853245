"""A version in host memory, for the threads of the rank that keeps it and for the other processes of its host."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time

import pytest
import torch
from torch import Tensor

from megatron_bridge.parallel.rank_sync import RankSync
from megatron_bridge.weight_sync import snapshot as module
from megatron_bridge.weight_sync.snapshot import HostSnapshot, shared_snapshot
from pipeline.background import in_background
from tests.support.ranks import run_ranks


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
    waiting = in_background(lambda: list(snapshot), "reader")
    snapshot.end(ValueError("broken"))
    with pytest.raises(ValueError, match="broken"):
        waiting.result()
    assert taken(snapshot, b=torch.ones(1)) == {"b": [1]}


def read_by(hosts: list[str]) -> list[object]:
    """What this rank reads of two versions, the second of which broke, and what file the tensors are in."""
    sync = RankSync(30.0)
    module.host_of_process = lambda: hosts[sync.rank]
    shared, found = shared_snapshot(sync, [0, 1, 2], pinned=False), list[object]()
    for version in (1, 2):
        if sync.rank:
            shared.begin()
            reading = in_background(lambda: {name: tensor.tolist() for name, tensor in shared}, "reader")
        sync.gather(lambda: None)  # the neighbors have begun, the keeper has not
        if shared.is_keeper:
            if not sync.rank:
                shared.begin()
            for name in ("a", "b"):
                shared.add(name, torch.full((2, 3), float(version + sync.rank)).bfloat16())
            time.sleep(0.05)
        shared.end(RuntimeError("the weights broke") if shared.is_keeper and version == 2 else None)
        if not sync.rank:
            reading = in_background(lambda: {name: tensor.tolist() for name, tensor in shared}, "reader")
        error = reading.exception()
        found.append(str(error) if error else reading.result())
    return [*found, os.fstat(shared._blocks).st_ino]


def test_neighbors_read_the_same_memory_and_other_hosts_their_own() -> None:
    first, second, third = run_ranks(3, read_by, ["a", "a", "b"])
    ones = [[1.0] * 3] * 2
    assert first[:2] == second[:2] == [{"a": ones, "b": ones}, "the weights broke"]
    threes = [[3.0] * 3] * 2
    assert third[:2] == [{"a": threes, "b": threes}, "the weights broke"]
    assert first[2] == second[2] != third[2]


KEEPER = """
import sys
from megatron_bridge.weight_sync.snapshot import HostSnapshot
snapshot = HostSnapshot(pinned=False)
snapshot.begin()
print(*snapshot.address, flush=True)
sys.stdin.read()
"""


def test_a_neighbor_of_a_keeper_that_died_does_not_wait_for_it() -> None:
    with subprocess.Popen([sys.executable, "-c", KEEPER], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as keeper:
        assert keeper.stdout is not None
        process, blocks, log = map(int, keeper.stdout.readline().split())
        shared = HostSnapshot(pinned=False, keeper=(process, blocks, log))
        shared.begin()
        reading = in_background(lambda: list(shared), "reader")
        keeper.kill()
    with pytest.raises(RuntimeError, match=f"process {process}, which kept the weights of this host, has ended"):
        reading.result()

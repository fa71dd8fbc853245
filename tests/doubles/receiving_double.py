"""A double of SGLang that takes weights over a real gloo group. tests/integration/test_broadcast.py compares its
answers with those of the real server.

Its rank lives in the threads of the HTTP server. `bucket_fault` strikes after `healthy_buckets` buckets.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, TCPStore

from tests.doubles.sglang_double import EngineDouble

BucketFault = Literal["refuse", "hang", "die"]


class ReceivingDouble(EngineDouble):
    """One rank."""

    def __init__(self, version: int = 0) -> None:
        super().__init__(version)
        self.session = False
        self.groups: dict[str, Any] = {}
        self.received: dict[str, Tensor] = {}
        self.joined: list[str] = []
        self.healthy_buckets = 0
        self.bucket_fault: BucketFault | None = None
        self.refuses_groups = False

    def restart(self) -> None:
        """Another process behind the same port."""
        self.stop()
        self.groups, self.session, self.version = {}, False, "unproved-0"
        self.bucket_fault = None
        self.start()

    def route(self, method: str, path: str, request: Any) -> tuple[int, Any] | None:
        if path in ("/begin_weight_update", "/end_weight_update"):
            opens = path.startswith("/begin")
            allowed, self.session = self.session != opens, opens
            return _answer(allowed, "Success" if allowed else "a weight-update session is already open, or none is")
        if path == "/init_weights_update_group":
            return self._join(request)
        if path == "/destroy_weights_update_group":
            return _answer(self.groups.pop(request["group_name"], None) is not None, "The group")
        if path == "/update_weights_from_distributed":
            return self._receive(request)
        return super().route(method, path, request)

    def _join(self, request: Any) -> tuple[int, Any]:
        name, wait = request["group_name"], timedelta(seconds=20)
        if self.refuses_groups:
            return _answer(False, "Failed to initialize custom process group")
        store: Any = TCPStore(request["master_address"], request["master_port"], request["world_size"], False, wait)
        for prefix in (name, f"{name}/", "cpu/"):
            store = PrefixStore(prefix, store)
        self.groups[name] = dist.ProcessGroupGloo(store, request["rank_offset"], request["world_size"], wait)
        self.joined.append(name)
        return _answer(True, "Succeeded to initialize custom process group.")

    def _receive(self, request: Any) -> tuple[int, Any] | None:
        group = self.groups.get(request["group_name"])
        if not self.session or group is None:
            return _answer(False, f"Failed to receive weights: Group {request['group_name']} not in")
        if not request["names"]:
            return _answer(True, "Succeeded to update parameter online.")
        assert request["flush_cache"], "cached prefixes would be those of other weights"
        if self.bucket_fault is not None and self.healthy_buckets == 0:
            return self._fail(self.bucket_fault)
        self.healthy_buckets -= 1
        dtypes = [getattr(torch, name) for name in request["dtypes"]]
        sizes = [
            torch.Size(shape).numel() * dtype.itemsize for shape, dtype in zip(request["shapes"], dtypes, strict=True)
        ]
        row = torch.empty(sum(sizes), dtype=torch.uint8)
        group.broadcast([row], dist.BroadcastOptions()).wait()
        parts = zip(request["names"], row.split(sizes), dtypes, request["shapes"], strict=True)
        self.received |= {name: part.view(dtype).reshape(shape) for name, part, dtype, shape in parts}
        return _answer(True, "Succeeded to update parameter online.")

    def _fail(self, fault: BucketFault) -> tuple[int, Any] | None:
        if fault == "refuse":
            return _answer(False, "Failed to update parameter online")
        if fault == "die":
            self.groups.clear()
            return None
        self._released.wait(30)
        return None


def _answer(success: bool, message: str) -> tuple[int, Any]:
    return (200 if success else 400), {"success": success, "message": message}

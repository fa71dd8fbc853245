"""A double of SGLang that takes weights over a real gloo group, or opens real shared memory.
tests/integration/test_broadcast.py compares its answers with those of the real server.

Its rank lives in the threads of the HTTP server. `bucket_fault` strikes after `healthy_buckets` buckets.
"""

from __future__ import annotations

import base64
import pickle
import time
from datetime import timedelta
from io import BytesIO
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, TCPStore

from tests.doubles.sglang_double import EngineDouble, Release

BucketFault = Literal["refuse", "hang", "die"]


class SafeUnpickler(pickle.Unpickler):  # noqa: S301
    """Knows, of the names that SGLang's own lets through, those that a bucket needs."""

    KNOWN = frozenset(
        [
            ("torch", "Size"),
            ("torch", "Tensor"),
            ("torch", "bfloat16"),
            ("torch", "float32"),
            ("torch", "float8_e4m3fn"),
            ("torch", "uint8"),
            ("torch.multiprocessing.reductions", "rebuild_storage_filename"),
            ("torch.multiprocessing.reductions", "rebuild_tensor"),
            ("torch.multiprocessing.reductions", "rebuild_typed_storage"),
            ("torch.storage", "UntypedStorage"),
            ("types", "SimpleNamespace"),
        ]
    )

    def find_class(self, module: str, name: str) -> Any:
        assert (module, name) in self.KNOWN, f"{module}.{name}"
        return super().find_class(module, name)


class ReceivingDouble(EngineDouble):
    """One rank."""

    def __init__(self, version: int = 0, *, sglang: Release = "0.5.23") -> None:
        super().__init__(version, sglang=sglang)
        self.has_sessions = sglang != "0.5.17"
        self.session = False
        self.groups: dict[str, Any] = {}
        self.received: dict[str, Tensor] = {}
        self.joined: list[str] = []
        self.opened = 0
        """Buckets in shared memory, once for each rank."""
        self.healthy_buckets = 0
        self.bucket_fault: BucketFault | None = None
        self.refuses_groups = False
        self.bucket_s = 0.0
        """Seconds that loading a bucket takes."""

    def restart(self) -> None:
        """Another process behind the same port."""
        self.stop()
        self.groups, self.session, self.version = {}, False, "unverified-0"
        self.bucket_fault = None
        self.start()

    def route(self, method: str, path: str, request: Any) -> tuple[int, Any] | None:
        if (fault := self.memory_fault(path)) is not None:
            return fault
        if path in ("/begin_weight_update", "/end_weight_update") and self.has_sessions:
            opens = path.startswith("/begin")
            allowed, self.session = self.session != opens, opens
            return _answer(allowed, "Success" if allowed else "a weight-update session is already open, or none is")
        if path == "/init_weights_update_group":
            return self._join(request)
        if path == "/destroy_weights_update_group":
            return _answer(self.groups.pop(request["group_name"], None) is not None, "The group")
        if path == "/update_weights_from_distributed":
            return self._receive(request)
        if path == "/update_weights_from_tensor":
            return self._open(request)
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
        if group is None or self.session != self.has_sessions:
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
        time.sleep(self.bucket_s)  # not before: a broadcast that the sender gave up would keep this thread in gloo
        parts = zip(request["names"], row.split(sizes), dtypes, request["shapes"], strict=True)
        self.received |= {name: part.view(dtype).reshape(shape) for name, part, dtype, shape in parts}
        return _answer(True, "Succeeded to update parameter online.")

    def _open(self, request: Any) -> tuple[int, Any] | None:
        if self.session != self.has_sessions:
            return _answer(False, "update_weights_from_tensor must run between begin_weight_update() and its end")
        assert request["flush_cache"], "cached prefixes would be those of other weights"
        assert request["load_format"] == "flattened_bucket"
        time.sleep(self.bucket_s)
        if self.bucket_fault is not None and self.healthy_buckets == 0:
            return self._fail(self.bucket_fault)
        self.healthy_buckets -= 1
        for payload in request["serialized_named_tensors"]:  # one for each rank
            bucket = SafeUnpickler(BytesIO(base64.b64decode(payload, validate=True))).load()
            row = bucket["flattened_tensor"]
            for one in bucket["metadata"]:
                tensor = row[one.start_idx : one.end_idx].view(one.dtype).reshape(one.shape)
                assert one.numel == tensor.nbytes
                self.received[one.name] = tensor.clone()
            self.opened += 1
        return _answer(True, "Success")

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

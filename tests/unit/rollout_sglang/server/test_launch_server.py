"""A scheduler that is spawned or forked ends with its server, also when that died before the scheduler could ask."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from torch import Tensor

from rollout_sglang.server import launch_server
from rollout_sglang.server.launch_server import PARENT_VARIABLE, register_hooks

SERVER = """\
import multiprocessing, os, pathlib, sys, time
from rollout_sglang.server.launch_server import be_a_parent, be_a_spawned_child

def child(folder):
    (pathlib.Path(folder) / "child").write_text(str(os.getpid()))
    time.sleep(600)

if __name__ == "__mp_main__":
    be_a_spawned_child()

if __name__ == "__main__":
    be_a_parent()
    multiprocessing.get_context(sys.argv[1]).Process(target=child, args=(sys.argv[2],)).start()
    time.sleep(600)
"""


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_children_end_with_the_server(tmp_path: Path, method: str) -> None:
    (tmp_path / "server.py").write_text(SERVER)
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[4])}
    with subprocess.Popen(
        [sys.executable, str(tmp_path / "server.py"), method, str(tmp_path)], env=environment
    ) as server:
        try:
            ends = time.monotonic() + 60
            while not ((tmp_path / "child").exists() and (tmp_path / "child").read_text()):
                assert time.monotonic() < ends
                time.sleep(0.02)
            child = psutil.Process(int((tmp_path / "child").read_text()))
        finally:
            server.kill()
    assert psutil.wait_procs([child], timeout=60)[1] == []


def test_a_spawned_child_whose_server_is_gone_ends() -> None:
    code = "from rollout_sglang.server.launch_server import be_a_spawned_child; be_a_spawned_child(); print('alive')"
    for parent, output in ((os.getpid(), "alive\n"), (1, "")):
        environment = {**os.environ, PARENT_VARIABLE: str(parent)}
        done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60)
        assert done.stdout == output


Hook = Callable[..., Any]


class Gpu:
    """Copies what it was told to when somebody waits for it."""

    def __init__(self) -> None:
        self._copies: list[tuple[Tensor, Tensor]] = []

    def copy(self, to: Tensor, values: Tensor) -> None:
        self._copies.append((to, values))

    def synchronize(self) -> None:
        while self._copies:
            to, values = self._copies.pop(0)
            to.copy_(values)


class WeightUpdater:
    """As much of SGLang's as loads a bucket. It returns while the device still copies."""

    device = "cuda"

    def __init__(self, gpu: Gpu) -> None:
        self.weight = torch.zeros(3)
        self._gpu = gpu

    def update_weights_from_tensor(self, named_tensors: Tensor, load_format: str) -> tuple[bool, str]:
        assert load_format == "flattened_bucket"
        self._gpu.copy(self.weight, named_tensors)
        return True, "Success"


@pytest.fixture
def hooks(monkeypatch: pytest.MonkeyPatch) -> dict[str, tuple[Hook, str]]:
    """What this process registered with a double of SGLang's registry: target → hook and its type."""
    found: dict[str, tuple[Hook, str]] = {}
    registry = ModuleType("sglang.srt.plugins.hook_registry")
    vars(registry)["HookType"] = SimpleNamespace(BEFORE="before", AFTER="after", AROUND="around")
    vars(registry)["HookRegistry"] = SimpleNamespace(register=lambda target, *hook: found.update({target: hook}))
    for name in ("sglang", "sglang.srt", "sglang.srt.plugins"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, registry.__name__, registry)
    register_hooks()
    return found


def test_memory_that_was_read_may_be_written_again(
    hooks: dict[str, tuple[Hook, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = Gpu()
    monkeypatch.setattr(torch, "get_device_module", {"cuda": gpu}.__getitem__)
    updater, lent = WeightUpdater(gpu), torch.ones(3)
    options = dict(named_tensors=lent, load_format="flattened_bucket")
    answer = updater.update_weights_from_tensor(**options)  # type: ignore[arg-type]
    hook, kind = hooks[f"{launch_server._UPDATER}.update_weights_from_tensor"]
    assert kind == "after"
    assert hook(answer, updater, **options) is None, "SGLang's answer stays"
    lent.fill_(2)
    gpu.synchronize()
    assert updater.weight.tolist() == [1, 1, 1]

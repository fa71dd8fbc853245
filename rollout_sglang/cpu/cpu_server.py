"""Start stock SGLang on a machine without CUDA: `python -m rollout_sglang.cpu.cpu_server <SGLang's own arguments>`.

What a CPU without SGLang's kernels needs: settings of the environment, stubs for missing GPU packages, quantized
linear layers emulated, and memory for the record of routed experts. All of it happens while this module is run, so that
a child that re-imports it (multiprocessing's `spawn` runs the module again as `__mp_main__`) is equipped like its
parent.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import sys
from collections.abc import Mapping
from typing import Any

from rollout_sglang.server.launch_server import register_hooks, serve

CPU_ENVIRONMENT: Mapping[str, str] = {
    "SGLANG_USE_CPU_ENGINE": "1",
    # Decoding is many small matrix products: threads only wait for one another.
    "OMP_NUM_THREADS": "1",
    # torch.compile would look for the kernels that are stubs here.
    "TORCHDYNAMO_DISABLE": "1",
    # Only our model families are imported, not SGLang's two hundred; the rest is still found when asked for.
    "SGLANG_EXTERNAL_MODEL_PACKAGE": "rollout_sglang.cpu.sglang_models",
}


def prepare() -> None:
    """Equip this process, before it imports anything of SGLang."""
    for name, value in CPU_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    from rollout_sglang.cpu.stubs import install_stubs

    install_stubs()
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from rollout_sglang.cpu import forward, quantized, staging

    register_hooks()
    quantized.register_hooks()
    forward.register_hooks()
    staging.register_hooks()
    HookRegistry.register("sglang.srt.state_capturer.base.BaseHostCache.__init__", _allow_cpu, HookType.BEFORE)
    HookRegistry.register("sglang.srt.entrypoints.engine._set_envs_and_config", _fork_children, HookType.AFTER)


def _allow_cpu(*_: Any, **__: Any) -> None:
    """SGLang keeps its record of routed experts (`--enable-return-routed-experts`) in host memory that it registers
    with CUDA. Here there is nothing to register it with: plain memory is the same."""
    import torch
    from sglang.srt.state_capturer.base import ALLOC_MEMORY_FUNCS

    ALLOC_MEMORY_FUNCS["cpu"] = lambda dims, dtype, device, **_: torch.zeros(dims, dtype=dtype, device=device)


def _fork_children(*_: object) -> None:
    """SGLang asks for `spawn`, which CUDA needs. Without CUDA a fork saves every child a dozen seconds of imports.

    What was imported stays: SGLang takes it out of garbage collection after its warm-up, which a CPU engine has not.
    """
    gc.freeze()
    multiprocessing.set_start_method("fork", force=True)


if __name__ in ("__main__", "__mp_main__"):
    prepare()

if __name__ == "__main__":
    serve(sys.argv[1:])

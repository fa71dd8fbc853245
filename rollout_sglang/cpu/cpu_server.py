"""Start stock SGLang on a machine without CUDA: `python -m rollout_sglang.cpu.cpu_server <SGLang's own arguments>`.

It adds to a CPU without SGLang's kernels: environment settings, stubs for missing GPU packages, emulated quantized
linear layers, and memory for the record of routed experts. All of it happens while this module runs, so that a child
that runs it again (multiprocessing's `spawn`, as `__mp_main__`) is prepared like its parent.
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
    # Decoding consists of many small matrix products, in which threads only wait for one another.
    "OMP_NUM_THREADS": "1",
    # torch.compile would look for the kernels that are stubs here.
    "TORCHDYNAMO_DISABLE": "1",
    # Imports only our model families, not SGLang's two hundred; the others are still found on request.
    "SGLANG_EXTERNAL_MODEL_PACKAGE": "rollout_sglang.cpu.sglang_models",
}


def prepare() -> None:
    """Prepare this process, before it imports anything of SGLang."""
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
    """Give SGLang plain memory for its record of routed experts (`--enable-return-routed-experts`). On a GPU it
    registers the memory with CUDA."""
    import torch
    from sglang.srt.state_capturer.base import ALLOC_MEMORY_FUNCS

    ALLOC_MEMORY_FUNCS["cpu"] = lambda dims, dtype, device, **_: torch.zeros(dims, dtype=dtype, device=device)


def _fork_children(*_: object) -> None:
    """Fork children, which saves each a dozen seconds of imports: SGLang asks for `spawn`, which only CUDA needs. Keep
    imports out of garbage collection, as SGLang does after its warm-up, which a CPU engine skips."""
    gc.freeze()
    multiprocessing.set_start_method("fork", force=True)


if __name__ in ("__main__", "__mp_main__"):
    prepare()

if __name__ == "__main__":
    serve(sys.argv[1:])

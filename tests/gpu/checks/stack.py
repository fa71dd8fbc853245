"""Does the stack load, and how fast is this card: the rates that other figures are compared with.

An H100 SXM is specified at 3.35 TB/s and 989 TFLOP/s in BF16, 1979 in FP8, without sparsity; what large copies and
products reach is less.
"""

from __future__ import annotations

import importlib
import subprocess
import sys

from tests.gpu.check import Figures, Goal, Scale, ratios

NAME = "stack"
AFTER: tuple[str, ...] = ()
PARTS = ("imports", "engine", "rates", "models")
DEADLINE_S = 120.0
GOALS = (
    Goal(figure="megatron_bridge", what="the learner's modules load"),
    Goal(figure="transformer_engine", what="Transformer Engine loads"),
    Goal(figure="engine", what="the engine's modules load, under its own Python"),
    Goal(figure="capability", what="compute capability"),
    Goal(figure="cuda", what="CUDA of torch"),
    Goal(figure="copy_gb_s", what="copy within device memory, read + written", unit="GB/s"),
    Goal(figure="bf16_tflop_s", what="BF16 matrix product", unit="TFLOP/s"),
    Goal(figure="fp8_tflop_s", what="FP8 matrix product, one scale a matrix", unit="TFLOP/s"),
    Goal(figure="fp8_over_bf16", what="FP8 ÷ BF16 rate"),
)


def run(scale: Scale) -> Figures:
    return {"imports": _imports, "engine": _engine, "rates": _rates, "models": _models}[scale.part](scale)


def _imports(scale: Scale) -> Figures:
    import torch

    scale.keep(cuda=str(torch.version.cuda))
    if not scale.rehearsal:
        name, (major, minor) = torch.cuda.get_device_name(), torch.cuda.get_device_capability()
        scale.keep(device=name, capability=f"{major}.{minor}")
    importlib.import_module("megatron_bridge.learner")
    importlib.import_module("megatron_bridge.weight_sync.disk")
    scale.keep(megatron_bridge="yes")
    scale.needs_transformer_engine()
    importlib.import_module("transformer_engine.pytorch")
    return scale.keep(transformer_engine="yes")


def _engine(scale: Scale) -> Figures:
    from rollout_sglang.server.rollout_python import module_environment, rollout_python

    modules = scale.of("sglang.srt.server_args, ", "") + "rollout_sglang.server.launch_server"
    asked = f"from importlib.metadata import version as v; import {modules}; print('sglang', v('sglang'))"
    command = [rollout_python() or sys.executable, "-c", asked]
    done = subprocess.run(command, env=module_environment(), stdout=subprocess.PIPE, text=True)
    if done.returncode:
        sys.exit(done.returncode)  # its error is the last line of the log
    return scale.keep(engine=done.stdout.splitlines()[-1])


def _rates(scale: Scale) -> Figures:
    import torch

    from tests.gpu.timing import copy_bandwidth, matmul_rate

    size = scale.of(8192, 256)
    scale.keep(copy_gb_s=copy_bandwidth(scale.device, scale.of(4 << 30, 1 << 20)) / 1e9)
    scale.keep(bf16_tflop_s=matmul_rate(scale.device, size, torch.bfloat16) / 1e12)
    return scale.keep(fp8_tflop_s=matmul_rate(scale.device, size, torch.float8_e4m3fn) / 1e12)


def _models(scale: Scale) -> Figures:
    """Make those that later checks would make while the GPU waits."""
    from tests.gpu.models import shared_model

    for size in ("1.7b", "32b-layers"):
        shared_model(scale, size)
    return {}


def derive(figures: Figures) -> Figures:
    return ratios(figures, {"fp8_over_bf16": ("fp8_tflop_s", "bf16_tflop_s")})

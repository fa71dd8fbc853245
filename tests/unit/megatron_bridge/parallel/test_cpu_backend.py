"""In a process of its own: what `cpu.install` changes stays changed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SCRIPT = """
import warnings
warnings.filterwarnings("ignore")
import torch
import megatron_bridge.parallel.cpu_backend as cpu

zeros, cuda = torch.zeros, torch.cuda.current_device
assert cpu.install() and cpu.install()

from megatron.core.optimizer import clip_grads
from megatron.core.tensor_parallel import random
assert clip_grads.torch is not torch
assert clip_grads.torch.zeros(2, device="cuda").device.type == "cpu"
assert clip_grads.torch.tensor([1.0], device=clip_grads.torch.cuda.current_device()).device.type == "cpu"
assert clip_grads.torch.zeros(1, device="meta").device.type == "meta"
assert clip_grads.torch.Tensor is torch.Tensor and clip_grads.torch.nn is torch.nn
assert torch.zeros is zeros and torch.cuda.current_device is cuda

x = torch.ones(2)
assert x.cuda() is x
assert x.type() == "torch.cuda.FloatTensor" and x.bfloat16().type() == "torch.cuda.BFloat16Tensor"
assert x.type(torch.float64).dtype == torch.float64

from megatron_bridge.parallel.layout import Layout, initialize
from pipeline.errors import LayoutError
try:
    initialize(Layout(tensor=2), seed=0, deadline_s=10)
    raise SystemExit("a world of one is not two tensor parallel ranks")
except LayoutError as error:
    assert "started with 1 processes" in str(error) and "needs 2" in str(error)

initialize(Layout(), seed=7, deadline_s=10)
tracker = random.get_cuda_rng_tracker()
before = torch.get_rng_state()
with tracker.fork():
    first = torch.rand(3)
with tracker.fork():
    second = torch.rand(3)
assert not torch.equal(first, second)               # the forked generator moved on
assert torch.equal(torch.get_rng_state(), before)   # the default one did not
"""


def test_megatron_is_redirected_and_torch_is_not() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], cwd=Path(__file__).parents[4], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr[-3000:]

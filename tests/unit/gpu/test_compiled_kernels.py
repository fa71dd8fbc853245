"""Every kernel compiles for an H100, without a GPU: into registers alone, with accesses as wide as they can be."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.triton_folder import run_with_triton

KERNELS = {"_statistics_kernel", "_gradient_kernel", "_block_kernel"}


@pytest.mark.slow
def test_kernels_compile_for_an_h100(tmp_path: Path) -> None:
    said = run_with_triton("ops.gpu.compile_kernels", "--json", interpret=False, cache=tmp_path)
    compiled = json.loads(said)
    assert {(one["kernel"], one["dtype"]) for one in compiled} == {
        (kernel, dtype) for kernel in KERNELS for dtype in ("bf16", "fp16", "fp32")
    }
    assert not [one for one in compiled if not one["is_fast"]]
    for one in compiled:  # at least 2 programs of 256 threads on a multiprocessor of 65,536 registers
        assert one["registers"] <= 128

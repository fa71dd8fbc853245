"""Converts to block FP8 and prints by how much the resident set grew, at most: SOURCE OUT."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from launch.convert.folders import hf_to_fp8
from megatron_bridge.hf import fp8, tensor_files  # noqa: F401 (imported before memory is looked at)


def resident_bytes(field: str) -> int:
    """VmRSS (now) or VmHWM (the most that there was)."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{field}:"))


if __name__ == "__main__":
    torch.set_num_threads(1)
    before = resident_bytes("VmRSS")
    hf_to_fp8(Path(sys.argv[1]), Path(sys.argv[2]), "block128", verify_logprobs=False)
    print(resident_bytes("VmHWM") - before)

"""What tests/unit/support/test_ranks.py runs in ranks."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist


def add_up(base: float) -> tuple[int, float]:
    total = torch.tensor(base + dist.get_rank())
    dist.all_reduce(total)
    return dist.get_rank(), float(total)


def what_is_loaded() -> list[str]:
    return sorted(sys.modules)


def raise_on_rank_one() -> None:
    if dist.get_rank() == 1:
        print("said before")
        raise ValueError("the reason")
    time.sleep(600)


def die(status: int) -> None:
    os._exit(status)


def hang() -> None:
    time.sleep(600)


def leave_a_child(begun: Path) -> None:
    """Makes the file `begun` once the child runs."""
    subprocess.Popen(["sleep", "600"])
    begun.touch()
    time.sleep(600)

"""The end of a test that joined a process group."""

from __future__ import annotations

import torch

from megatron_bridge.parallel.layout import leave_layout


def leave_world() -> None:
    """Leave the parallel groups and the process group, so that another test may join others."""
    leave_layout()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()

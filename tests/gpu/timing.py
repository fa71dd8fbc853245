"""Seconds of device work, and the two yardsticks that other figures are divided by. Needs torch.

Yardsticks are measured beside what they judge: a card's clocks and the heat of its neighbors differ from hour to hour.
Inputs are random: zeros multiply faster than data.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

WARM_UP, ROUNDS = 3, 9


def synchronize() -> None:
    """Wait for the GPU, where there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def seconds(action: Callable[[], Any], *, rounds: int = ROUNDS, warm_up: int = WARM_UP) -> float:
    """Median over `rounds`, by CUDA events, after `warm_up` runs: these load modules and compile kernels."""
    for _ in range(warm_up):
        action()
    synchronize()
    return statistics.median(_once(action) for _ in range(rounds))


def _once(action: Callable[[], Any]) -> float:
    if not torch.cuda.is_available():
        began = time.perf_counter()
        action()
        return time.perf_counter() - began
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    first.record()
    action()
    last.record()
    last.synchronize()
    return float(first.elapsed_time(last)) / 1e3


def wall_seconds(action: Callable[[], Any]) -> float:
    """Of one run that ends on the host."""
    synchronize()
    began = time.perf_counter()
    action()
    synchronize()
    return time.perf_counter() - began


def copy_bandwidth(device: str, num_bytes: int) -> float:
    """Bytes a second of a copy within the device's memory, those read and those written counted."""
    source = torch.randint(0, 255, (num_bytes,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2.0 * num_bytes / seconds(lambda: target.copy_(source))


def matmul_rate(device: str, size: int, dtype: torch.dtype) -> float:
    """Floating-point operations a second of a square product: bfloat16, or e4m3 with one scale a matrix."""
    left, right = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    if dtype is not torch.float8_e4m3fn:
        product: Callable[[], Tensor] = lambda: left @ right  # noqa: E731
    else:
        one = torch.ones((), device=device)
        a, b = left.to(dtype), right.to(dtype).t()  # the second operand column by column
        product = lambda: torch._scaled_mm(a, b, scale_a=one, scale_b=one, out_dtype=torch.bfloat16)  # noqa: E731
    return 2.0 * size**3 / seconds(product)


def peak_extra_bytes(action: Callable[[], Any]) -> int:
    """Most GPU memory held during `action` beyond what was held before; 0 on a CPU."""
    if not torch.cuda.is_available():
        action()
        return 0
    synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    action()
    synchronize()
    return int(torch.cuda.max_memory_allocated() - before)


def kernel_table(rows: Iterable[Any]) -> list[object]:
    """Lines of tests.bench.kernels as a table of results."""
    table: list[object] = [["kernel", "variant", "ms", "÷ copy of as many bytes", "torch ÷ kernel"]]
    for row in rows:
        beside = "" if row.torch_over_kernel is None else round(row.torch_over_kernel, 2)
        table.append([row.kernel, row.variant, round(row.milliseconds, 4), round(row.over_copy, 3), beside])
    return table


def relative_error(found: Tensor, reference: Tensor) -> float:
    """‖found − reference‖ / ‖reference‖ in float64; NaN where `found` has one."""
    difference = found.double() - reference.double().to(found.device)
    return float(difference.norm() / reference.double().norm())

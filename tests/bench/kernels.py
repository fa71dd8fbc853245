"""Times of the GPU kernels and of their variants, beside a copy of as many bytes in the same run. Needs a GPU.

    statistics   log-probabilities and entropies, forward: reads the logits
    gradient     backward in place, every row with a gradient: reads and writes them
    masked       backward where seven rows of eight have none: these are only written
    block        e4m3 in 128×128 blocks: reads 2 bytes a number, writes 1, waits once for the check of the scales

`over_copy` is the time against moving the same bytes at the bandwidth of a copy; `torch_over_kernel` is the time of the
chunked or plain torch path against the kernel's. Variants are warps of a program and lanes of the vocabulary's kernels
or registers of the block kernel's threads; the first is what is in use. Weights take turns, so that none is found in
the cache.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from megatron_bridge.model import logprobs
from precision.formats import formats
from tests.gpu import timing

TOKENS, VOCABULARY = 8192, 151_936
WEIGHT = (5120, 25_600)
NUM_WEIGHTS = 3
"""Times 262 MB: several times what a cache holds."""
VOCABULARY_VARIANTS = ((256, 8), (512, 8), (1024, 8), (256, 4), (512, 4), (512, 16), (1024, 16))
"""Lanes, warps."""
QUANTIZE_VARIANTS = ((8, 80), (8, 64), (8, 96), (16, 64), (4, 160))
"""Warps, registers of a thread."""
TEMPERATURE = 0.9


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    kernel: str
    variant: str
    milliseconds: float
    over_copy: float
    torch_over_kernel: float | None = None


class Bench:
    """Kernels on one device, against its copy."""

    def __init__(self) -> None:
        self._bytes_per_second = timing.copy_bandwidth("cuda", TOKENS * VOCABULARY * 2)

    def row(
        self, kernel: str, variant: str, moved: int, action: Callable[[], Any], torch_s: float | None = None
    ) -> Row:
        """`moved` bytes by `action`."""
        seconds = timing.seconds(action)
        floor = moved / self._bytes_per_second
        return Row(kernel, variant, seconds * 1e3, seconds / floor, None if torch_s is None else torch_s / seconds)

    def vocabulary(self) -> Iterator[Row]:
        """The rows of `logprobs_triton`."""
        from megatron_bridge.model import logprobs_triton

        logits = (3 * torch.randn(TOKENS, VOCABULARY, device="cuda", dtype=torch.bfloat16)).contiguous()
        wanted = torch.randint(0, VOCABULARY, (TOKENS,), device="cuda")
        peak, sums = logprobs.statistics(logits, wanted, TEMPERATURE)
        normalizer, scale = peak + sums[0].log(), torch.ones_like(peak)
        few = torch.where(torch.arange(TOKENS, device="cuda") % 8 == 0, scale, 0)

        def gradient(module: Any, upstream: Tensor) -> None:
            module.write_gradient(logits, wanted, normalizer, upstream, TEMPERATURE, logits)

        torch_s = timing.seconds(lambda: logprobs.statistics(logits, wanted, TEMPERATURE))
        for lanes, warps in VOCABULARY_VARIANTS:
            with variant(logprobs_triton, _LANES=lanes, _WARPS=warps):
                forward = lambda: logprobs_triton.statistics(logits, wanted, TEMPERATURE)  # noqa: E731
                yield self.row("statistics", f"{lanes}/{warps}", logits.nbytes, forward, torch_s)
        torch_s = timing.seconds(lambda: gradient(logprobs, scale))
        for lanes, warps in VOCABULARY_VARIANTS:
            with variant(logprobs_triton, _LANES=lanes, _WARPS=warps):
                both = 2 * logits.nbytes
                yield self.row("gradient", f"{lanes}/{warps}", both, lambda: gradient(logprobs_triton, scale), torch_s)
                written = logits.nbytes * 9 // 8
                yield self.row("masked", f"{lanes}/{warps}", written, lambda: gradient(logprobs_triton, few))

    def quantization(self) -> Iterator[Row]:
        """The rows of `quantize_triton`."""
        from precision.formats import quantize_triton

        weights = [0.02 * torch.randn(WEIGHT, device="cuda", dtype=torch.bfloat16) for _ in range(NUM_WEIGHTS)]
        turns = itertools.cycle(weights)
        moved = weights[0].numel() * 3
        torch_s = timing.seconds(lambda: formats.quantize_block(next(turns)))
        for warps, registers in QUANTIZE_VARIANTS:
            with variant(quantize_triton, WARPS=warps, REGISTERS=registers):
                action = lambda: quantize_triton.quantize_block(next(turns))  # noqa: E731
                yield self.row("block", f"{warps}/{registers}", moved, action, torch_s)


@contextmanager
def variant(module: Any, **values: int) -> Iterator[None]:
    """With other constants of a module."""
    with mock.patch.multiple(module, **values):
        yield


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="one line instead of the table")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("error: no CUDA device; these kernels run at speed on a GPU only")
    torch.manual_seed(0)
    bench = Bench()
    rows = [*bench.vocabulary(), *bench.quantization()]
    if arguments.json:
        print(json.dumps({"device": torch.cuda.get_device_name(), "rows": [asdict(row) for row in rows]}))
        return
    print(torch.cuda.get_device_name())
    for row in rows:
        beside = "" if row.torch_over_kernel is None else f"  torch takes {row.torch_over_kernel:.1f}x"
        print(f"{row.kernel:11} {row.variant:8} {row.milliseconds:8.3f} ms  {row.over_copy:.2f} copies{beside}")


if __name__ == "__main__":
    main()

"""e4m3 quantization of weights on the GPU: the same bits as the reference, and how close to the speed of a copy.

A kernel that reads a bfloat16 weight once and writes e4m3 moves 3 bytes a number and 4 a block: at 3 TB/s one of
6144 × 2048 takes 13 µs. Bytes are counted so, whatever the implementation really moves.
"""

from __future__ import annotations

from typing import Any

from tests.gpu.check import Figures, Goal, NotMeasured, Scale

NAME = "quantize"
AFTER: tuple[str, ...] = ()
PARTS = ("one", "variants")
DEADLINE_S = 120.0
GOALS = (
    Goal(figure="block_wrong_bytes", what="bytes that differ from the reference, 128×128 blocks", at_most=0.0),
    Goal(figure="block_gb_s", what="128×128 blocks, read + written", unit="GB/s"),
    Goal(figure="block_over_copy", what="its time ÷ a copy that moves as many bytes", at_most=1.6),
    Goal(figure="reference_over_kernel", what="time of the torch reference ÷ the kernel's, blocks"),
)


def run(scale: Scale) -> Figures:
    if scale.rehearsal:
        raise NotMeasured("needs a GPU: elsewhere Triton's kernels run interpreted, in unit tests")
    return _variants() if scale.part == "variants" else _one(scale)


def _variants() -> Figures:
    """Which launch constants of the kernels are fastest here."""
    from tests.bench.kernels import Bench
    from tests.gpu.timing import kernel_table

    return {"variants (warps/registers)": kernel_table(Bench().quantization())}


def _one(scale: Scale) -> Figures:
    import torch

    from precision.formats import formats, quantize_triton
    from tests.gpu import timing

    wrong = sum(
        differing_bytes(quantize_triton.quantize_block(weight), formats.quantize_block(weight))
        for weight in samples(scale)
    )
    scale.keep(block_wrong_bytes=float(wrong))
    weight = torch.randn(16384, 8192, device=scale.device).bfloat16()
    moved = weight.numel() * 3
    bandwidth = timing.copy_bandwidth(scale.device, moved)
    block_s = timing.seconds(lambda: quantize_triton.quantize_block(weight))
    scale.keep(block_gb_s=moved / block_s / 1e9, block_over_copy=block_s / (moved / bandwidth))
    reference_s = timing.seconds(lambda: formats.quantize_block(weight))
    return scale.keep(reference_over_kernel=reference_s / block_s)


def samples(scale: Scale) -> list[Any]:
    """Weights [out, in] with what is hard to round: edges of blocks, ties, subnormals, zeros, one huge number."""
    import torch

    torch.manual_seed(0)
    rows, columns = scale.of((6144, 2048), (256, 128))
    plain = torch.randn(rows, columns, device=scale.device) * 0.02
    ragged = torch.randn(rows - 5, columns + 77, device=scale.device)
    steep = plain * torch.logspace(-12, 0, columns, device=scale.device)
    ties = torch.arange(rows * columns, device=scale.device).reshape(rows, columns).remainder(4096) / 64.0
    spiked = plain.clone()
    spiked[0, 0] = 3.0e4
    empty = torch.zeros_like(plain)
    return [
        one.to(dtype)
        for one in (plain, ragged, steep, ties, spiked, empty)
        for dtype in (torch.bfloat16, torch.float32)
    ]


def differing_bytes(found: tuple[Any, Any], reference: tuple[Any, Any]) -> int:
    """Over values and scales."""
    import torch

    return sum(
        int((one.contiguous().reshape(-1).view(torch.uint8) != other.contiguous().reshape(-1).view(torch.uint8)).sum())
        for one, other in zip(found, reference, strict=True)
    )

"""The statistics of weights that an audit compares (precision.formats.audit), on any device.

Runs in an engine's interpreter too: needs torch, and nothing else that SGLang does not have.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from precision.formats.audit import Held, Scales, audited_name
from precision.formats.formats import E4M3
from precision.formats.quant_map import QuantMap
from precision.formats.rollout_format import BLOCK, RolloutFormat
from precision.formats.streams import fake_quantize_state

_ROWS_AT_ONCE = 4096
"""A multiple of a block's rows. A wide matrix is not made float32 as a whole: an engine has no memory for that."""


def sum_of_squares(values: Tensor, scales: Tensor | None = None, block: tuple[int, int] = BLOCK) -> float:
    """Σ (value × scale)² of a matrix [rows, columns], or of a stack of them, of any floating dtype.

    `scales`: None; one value; one a row, [rows] or [rows, 1]; or one a block of `block`, [⌈rows/128⌉, ⌈columns/128⌉].
    """
    matrices = values.detach().reshape(-1, *values.shape[-2:]) if values.dim() > 1 else values.detach()[None, None]
    total = torch.zeros((), dtype=torch.float64, device=values.device)
    rows = matrices.shape[1]
    per_matrix = None if scales is None else _scales_of_matrices(scales.detach().float(), matrices, block)
    for index, matrix in enumerate(matrices):
        for start in range(0, rows, _ROWS_AT_ONCE):
            squares = matrix[start : start + _ROWS_AT_ONCE].float().square()
            if per_matrix is not None:
                squares = squares * _spread(per_matrix[index], squares, start, rows, block).square()
            total += squares.sum(dtype=torch.float64)
    return float(total)


def scale_statistics(scales: Tensor) -> Scales:
    """Of all scales of a module."""
    flat = scales.detach().double().flatten()
    smallest, largest = flat.aminmax()
    return Scales(count=flat.numel(), smallest=float(smallest), largest=float(largest), total=float(flat.sum()))


def published_modules(named_tensors: Iterable[tuple[str, Tensor]], quant_map: QuantMap) -> dict[str, Held]:
    """What an engine should hold of a published policy (HF names, as `quantize_state` yields them, or as a policy
    folder holds them): audited name of each module of the map → its statistics."""
    found: dict[str, Held] = {}
    waiting: dict[str, Tensor] = {}
    plain: dict[str, Tensor] = {}
    modules = {module for group in quant_map.fused_groups for module in group}
    for name, tensor in named_tensors:
        module, _, kind = name.rpartition(".")
        if module not in modules or kind not in ("weight", "weight_scale_inv"):
            continue
        rollout_format = quant_map.formats.get(module)
        if rollout_format is not None and rollout_format.is_emulated:  # sent as they are multiplied by
            _add(found, module, _values_module(tensor, rollout_format))
        elif rollout_format is not RolloutFormat.FP8_BLOCK:
            plain[name] = tensor
        elif module in waiting:
            pair = {"weight": tensor, "weight_scale_inv": waiting.pop(module)}
            if kind == "weight_scale_inv":
                pair = {"weight": pair["weight_scale_inv"], "weight_scale_inv": tensor}
            _add(found, module, _block_module(pair))
        else:
            waiting[module] = tensor
    return found | emulated_modules(plain.items(), quant_map.restricted(name.removesuffix(".weight") for name in plain))


def emulated_modules(named_tensors: Iterable[tuple[str, Tensor]], quant_map: QuantMap) -> dict[str, Held]:
    """What the learner's emulation of the map multiplies by, from weights that are not quantized, by audited name. The
    scales are not known."""
    found: dict[str, Held] = {}
    modules = {module for group in quant_map.fused_groups for module in group}
    for name, values in fake_quantize_state(named_tensors, quant_map):
        module = name.removesuffix(".weight")
        if name.endswith(".weight") and module in modules:
            _add(found, module, _values_module(values, quant_map.formats.get(module)))
    return found


def _values_module(values: Tensor, rollout_format: RolloutFormat | None) -> Held:
    return Held(
        layout=str(rollout_format or "full"),
        dtype=str(values.dtype).removeprefix("torch."),
        num_values=values.numel(),
        squares=sum_of_squares(values),
    )


def _block_module(tensors: Mapping[str, Tensor]) -> Held:
    weight, scales = tensors["weight"], tensors["weight_scale_inv"]
    return Held(
        layout=RolloutFormat.FP8_BLOCK.value,
        dtype=str(E4M3).removeprefix("torch."),
        num_values=weight.numel(),
        squares=sum_of_squares(weight, scales),
        scales=scale_statistics(scales),
    )


def _add(found: dict[str, Held], module: str, held: Held) -> None:
    name = audited_name(module)
    found[name] = found[name].plus(held) if name in found else held


def _scales_of_matrices(scales: Tensor, matrices: Tensor, block: tuple[int, int]) -> Tensor:
    """[matrices, rows that have scales of their own, columns that have]"""
    count, rows, columns = matrices.shape
    grid = -(-rows // block[0]), -(-columns // block[1])
    # By shape, not by number: a matrix of 16,384 columns has as many blocks as rows.
    if scales.shape[-2:] == grid:
        return scales.reshape(count, *grid)
    return scales.reshape(count, scales.numel() // count, 1)


def _spread(scales: Tensor, piece: Tensor, start: int, num_rows: int, block: tuple[int, int]) -> Tensor:
    """Scales of a matrix of `num_rows`, as they multiply the values of `piece`, its rows from `start` on."""
    rows, columns = piece.shape
    per_row = {1: num_rows, num_rows: 1}.get(scales.shape[0], block[0])
    per_column = columns if scales.shape[1] == 1 else block[1]
    spread = scales[start // per_row : -(-(start + rows) // per_row)].repeat_interleave(per_row, 0)[:rows]
    return spread.repeat_interleave(per_column, 1)[:, :columns]

"""Compute the statistics of weights that an audit compares (precision.formats.audit), on any device.

Runs in an engine's interpreter too: beside torch it needs only packages that SGLang has.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from precision.formats.audit import FULL, Held, Scales, audited_name
from precision.formats.quant_map import QuantMap
from precision.formats.rollout_format import BLOCK, RolloutFormat
from precision.formats.streams import fake_quantize_state

_ROWS_AT_ONCE = 4096
"""A multiple of a block's rows. A wide matrix is not converted to float32 as a whole: an engine lacks the memory."""


def sum_of_squares(values: Tensor, scales: Tensor | None = None, block: tuple[int, int] = BLOCK) -> float:
    """Sum (value × scale)² of a matrix [rows, columns], or of a stack of matrices, of any floating dtype. `scales`:
    None; a single value; one per row, [rows] or [rows, 1]; or one per block, [⌈rows/128⌉, ⌈columns/128⌉]."""
    matrices = values.detach().reshape(-1, *values.shape[-2:]) if values.dim() > 1 else values.detach()[None, None]
    count, rows, columns = matrices.shape
    total = torch.zeros((), dtype=torch.float64, device=values.device)
    if scales is not None:
        grid = -(-rows // block[0]), -(-columns // block[1])
        # By shape, not by number: a matrix of 16,384 columns has as many blocks as rows.
        sides = grid if scales.shape[-2:] == grid else (scales.numel() // count, 1)
        scales = scales.detach().float().reshape(count, *sides)
    for index, matrix in enumerate(matrices):
        for start in range(0, rows, _ROWS_AT_ONCE):
            squares = matrix[start : start + _ROWS_AT_ONCE].float().square()
            if scales is not None:
                own, end = scales[index], start + len(squares)
                per_row = {1: rows, rows: 1}.get(own.shape[0], block[0])
                per_column = columns if own.shape[1] == 1 else block[1]
                spread = own[start // per_row : -(-end // per_row)].repeat_interleave(per_row, 0)[: len(squares)]
                squares = squares * spread.repeat_interleave(per_column, 1)[:, :columns].square()
            total += squares.sum(dtype=torch.float64)
    return float(total)


def scale_statistics(scales: Tensor) -> Scales:
    flat = scales.detach().double().flatten()
    smallest, largest = flat.aminmax()
    return Scales(count=flat.numel(), smallest=float(smallest), largest=float(largest), total=float(flat.sum()))


def published_modules(named_tensors: Iterable[tuple[str, Tensor]], quant_map: QuantMap) -> dict[str, Held]:
    """Return the expected statistics of a published policy: audited name of each module of the map → its statistics.
    Tensors have HF names, as from `quantize_state` or in a policy folder."""
    found: dict[str, Held] = {}
    pairs: dict[str, dict[str, Tensor]] = {}
    plain: dict[str, Tensor] = {}
    modules = {module for group in quant_map.fused_groups for module in group}
    for name, tensor in named_tensors:
        module, _, kind = name.rpartition(".")
        if module not in modules or kind not in ("weight", "weight_scale_inv"):
            continue
        rollout_format = quant_map.formats.get(module)
        if rollout_format is not None and rollout_format.is_emulated:  # sent rounded, as the engine multiplies by them
            _add(found, module, rollout_format, tensor)
        elif rollout_format is not RolloutFormat.FP8_BLOCK:
            plain[name] = tensor
        else:
            pair = pairs.setdefault(module, {})
            pair[kind] = tensor
            if len(pair) == 2:
                del pairs[module]
                _add(found, module, rollout_format, pair["weight"], pair["weight_scale_inv"])
    return found | emulated_modules(plain.items(), quant_map.restricted(name.removesuffix(".weight") for name in plain))


def emulated_modules(named_tensors: Iterable[tuple[str, Tensor]], quant_map: QuantMap) -> dict[str, Held]:
    """Return audited name → statistics, without scales, of the learner's emulation of the map, from plain weights."""
    found: dict[str, Held] = {}
    modules = {module for group in quant_map.fused_groups for module in group}
    for name, values in fake_quantize_state(named_tensors, quant_map):
        module = name.removesuffix(".weight")
        if name.endswith(".weight") and module in modules:
            _add(found, module, quant_map.formats.get(module), values)
    return found


def _add(
    found: dict[str, Held],
    module: str,
    rollout_format: RolloutFormat | None,
    values: Tensor,
    scales: Tensor | None = None,
) -> None:
    """Add the statistics of a weight to those of its audited module."""
    held = Held(
        layout=str(rollout_format or FULL),
        dtype=str(values.dtype).removeprefix("torch."),
        num_values=values.numel(),
        squares=sum_of_squares(values, scales),
        scales=None if scales is None else scale_statistics(scales),
    )
    name = audited_name(module)
    found[name] = found[name].plus(held) if name in found else held

"""Report the formats in which an engine holds its weights: `POST /weights_checker {"action": "formats"}`. With the
action `statistics`, read all weights and report their scales and norms as well. `moved` names the weights that lie
elsewhere than when CUDA graphs were captured: a graph would go on reading the old ones. `nccl` names
the release of NCCL.

SGLang's own route asks each of an engine's processes and gathers their answers: parameter name → text. This module adds
actions whose text describes a module (precision.formats.audit.Held) instead of a checksum. The rest of the server is
unchanged, and nothing is computed before a request. The report describes the layers after loading: the method that
multiplies, the dtype, the scales.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from pipeline.nccl import loaded_release
from precision.formats.audit import KV_CACHE, Held
from precision.formats.rollout_format import BLOCK, STACKS
from precision.formats.weight_statistics import scale_statistics, sum_of_squares
from rollout_sglang.protocol import FORMATS, MOVED, NCCL, STATISTICS

_CAPTURED = "even_keel_captured"
"""The attribute of a model with the addresses of its weights at the capture."""


def note_addresses(_: Any, runner: Any, *__: Any, **___: Any) -> None:
    """Note where the weights lie if CUDA graphs were captured."""
    graphs = runner.decode_cuda_graph_runner, runner.prefill_cuda_graph_runner
    if any(graph is not None and graph is not runner.eager_runner for graph in graphs):
        setattr(runner.model, _CAPTURED, _addresses(runner.model))


def _addresses(model: nn.Module) -> dict[str, int]:
    return {name: tensor.data_ptr() for name, tensor in model.named_parameters()}


def handle(original: Callable[..., Any], checker: Any, *args: Any, **options: Any) -> Any:
    """Answer the actions of this module, and pass others to `original`, SGLang's WeightChecker.handle."""
    action = options.get("action", args[0] if args else None)
    if action not in (FORMATS, STATISTICS, MOVED, NCCL):
        return original(checker, *args, **options)
    model = checker._get_model()
    placement = checker._parallelism_info(**{name: options[name] for name in ("role",) if name in options})
    report = dict(per_gpu_checksum="", parallelism_info=placement.model_dump())
    if action == NCCL:
        return report | dict(checksums={NCCL: loaded_release()})
    if action == MOVED:
        captured = getattr(model, _CAPTURED, {})
        now = _addresses(model) if captured else {}
        return report | dict(checksums={name: MOVED for name in captured if now.get(name) != captured[name]})
    try:
        from sglang.srt.runtime_context import get_model

        asked = str(get_model().kv_cache_dtype)
    except (ImportError, AttributeError):  # before SGLang 0.5.23, which keeps the model elsewhere
        asked = "auto"
    return report | dict(
        checksums={
            name: json.dumps(asdict(held))
            for name, held in (
                *held_modules(model, statistics=action == STATISTICS),
                *held_caches(model, asked),
            )
        }
    )


@torch.no_grad()
def held_modules(model: nn.Module, *, statistics: bool = True) -> Iterator[tuple[str, Held]]:
    """Yield every module that multiplies by a weight, under its Hugging Face name. Parts of a stacked matrix are
    separate modules. The experts of a layer are two modules, `….experts.gate_up_proj` and `….experts.down_proj`.
    Without `statistics` only the kind and size of a weight is read."""
    for name, module in model.named_modules():
        method = getattr(module, "quant_method", None)
        if method is None:
            continue
        if isinstance(getattr(module, "w13_weight", None), Tensor):
            for part, prefix in (("gate_up_proj", "w13_weight"), ("down_proj", "w2_weight")):
                values = _Values(getattr(module, prefix), _scales(module, prefix))
                yield f"{name}.{part}", _held(method, values, statistics)
        elif isinstance(getattr(module, "weight", None), Tensor):
            for part, values in _parts(name, module):
                yield part, _held(method, values, statistics)


def held_caches(model: nn.Module, asked: str) -> Iterator[tuple[str, Held]]:
    """Yield every attention layer that keeps its keys and values in FP8, with their scales: SGLang uses 1.0 where a
    checkpoint has none. `asked` is the server's --kv-cache-dtype."""
    config = getattr(model, "quant_config", None)
    stored = str(getattr(config, "kv_cache_quant_algo", None)).lower() if asked == "auto" else asked
    if "fp8" not in stored:
        return
    for name, module in model.named_modules():
        if type(module).__name__ == "RadixAttention":
            known = [getattr(module, scale, None) for scale in ("k_scale_float", "v_scale_float")]
            scales = torch.tensor([1.0 if scale is None else float(scale) for scale in known])
            yield name, Held(layout=KV_CACHE, dtype=stored, num_values=0, scales=scale_statistics(scales))


class _Values(NamedTuple):
    """The values of a weight, or of one part of a stacked weight."""

    weight: Tensor
    scales: Tensor | None
    exact: Tensor | None = None
    """The values that the layer multiplies by, where it keeps them beside the weight."""


def _parts(name: str, module: Any) -> Iterator[tuple[str, _Values]]:
    """Yield a linear layer, or the linear layers that were stacked into it."""
    before, _, own = name.rpartition(".")
    sizes = list(getattr(module, "output_partition_sizes", ()))
    weight, scales, num_rows = module.weight.data, _scales(module, "weight"), sum(sizes)
    transposed = weight.dim() == 2 and weight.shape[1] == num_rows  # some kernels hold it so
    if transposed and (weight.shape[0] != num_rows or weight.stride(0) == 1):
        weight = weight.t()
    exact = getattr(module, "dequantized_weight", None)  # of CPU engines: rollout_sglang.cpu.quantized
    if own not in STACKS or len(sizes) != len(STACKS[own]) or weight.shape[0] != num_rows:
        yield name, _Values(weight, scales, exact)
        return
    start = 0
    for part, size in zip(STACKS[own], sizes, strict=True):
        rows = slice(start, start + size)
        own_scales = scales  # a single scale of the stack applies to each part
        if scales is not None and scales.numel() > 1:
            by_row = scales.shape[0] == num_rows
            own_scales = scales.reshape(-1)[rows] if by_row else scales[start // BLOCK[0] : -(-rows.stop // BLOCK[0])]
        yield f"{before}.{part}", _Values(weight[rows], own_scales, None if exact is None else exact[rows])
        start += size


def _held(method: Any, values: _Values, statistics: bool) -> Held:
    weight, scales, exact = values
    # Exponents, packed four to an int32 by DeepGEMM on Blackwell. SGLang has requantized the weights by them, and no
    # published version can be loaded over them.
    packed = scales is not None and not scales.is_floating_point()
    squares = None
    if statistics and not packed:
        squares = sum_of_squares(weight, scales) if exact is None else sum_of_squares(exact)
    return Held(
        layout=_layout(method, weight, scales, packed),
        dtype=str(weight.dtype).removeprefix("torch."),
        num_values=weight.numel(),
        squares=squares,
        scales=scale_statistics(scales) if statistics and scales is not None and not packed else None,
    )


def _layout(method: Any, weight: Tensor, scales: Tensor | None, packed: bool) -> str:
    """Return the name of the format, or SGLang's name of the method where the format is not one of ours."""
    kind = type(method).__name__
    if kind == "EmulatedLinearMethod":  # rollout_sglang.cpu.emulated_layers
        return str(method.rollout_format)
    if kind.startswith("Unquantized"):
        return "full"
    if kind not in ("Fp8LinearMethod", "Fp8MoEMethod"):
        return kind
    if getattr(method, "use_mxfp8", False):
        return "mxfp8"
    if method.block_quant:
        block = list(method.quant_config.weight_block_size)
        if packed:
            return f"fp8 in blocks of {block} with packed power-of-two scales"
        return "fp8_block" if block == list(BLOCK) and weight.element_size() == 1 else f"fp8 in blocks of {block}"
    matrices = weight.shape[0] if weight.dim() == 3 else 1
    per_row = scales is not None and scales.numel() == matrices * weight.shape[-2] and weight.shape[-2] > 1
    return "fp8_channel" if per_row else "fp8_tensor"


def _scales(module: Any, weight: str) -> Tensor | None:
    for suffix in ("_scale_inv", "_scale"):
        found = getattr(module, weight + suffix, None)
        if isinstance(found, Tensor) and found.numel():
            return found.data
    return None

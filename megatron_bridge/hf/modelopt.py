"""Quantize with NVIDIA ModelOpt: e4m3 with one scale a matrix, and one static, calibrated scale for its inputs.

SGLang's quantization `modelopt_fp8` reads the result. The whole model is loaded: ModelOpt works on torch modules.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from megatron_bridge.hf.folders import complete_folder
from megatron_bridge.hf.tensor_files import Manifest, TensorFolder, torch_dtype, write_shards
from pipeline.errors import ModelError
from precision.formats.formats import E4M3
from precision.formats.quant_map import QuantMap

SCALES = ("weight_scale", "input_scale")
DEFAULT_SCALE = 1.0
"""The value that an engine silently assumes for a scale without calibration."""


def export_quantized(source: Path, folder: Path, rows: Sequence[Sequence[int]], *, quant: QuantMap) -> None:
    """Calibrate on token rows and write ModelOpt's export. Needs its own process: ModelOpt patches torch and others."""
    import modelopt.torch.quantization as mtq
    from modelopt.torch.export import export_hf_checkpoint
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(source, dtype="auto").eval()
    rules = list(mtq.FP8_DEFAULT_CFG["quant_cfg"])

    def calibrate(instrumented: Any) -> None:
        with torch.no_grad():
            for row in rows:
                instrumented(torch.tensor([list(row)]))

    model = mtq.quantize(model, {"quant_cfg": rules, "algorithm": "max"}, calibrate)
    for group in quant.fused_groups:  # one scale for a stack: with several, engines would round again
        quantizers = [model.get_submodule(module).weight_quantizer for module in group]
        shared = torch.stack([quantizer.amax.max() for quantizer in quantizers]).max()
        for quantizer in quantizers:
            quantizer.amax = shared.clone()
    export_hf_checkpoint(model, export_dir=str(folder))


def store_export(
    export: Path, source: Path, folder: Path, hf_config: dict[str, Any], *, advance: Callable[[int], None]
) -> Manifest:
    """Write ModelOpt's `export` as a folder that SGLang loads, with manifest and tokenizer."""
    tensors = TensorFolder(export)
    stream = ((tensors.specs[name], tensors.pieces(name)) for name in tensors.specs)
    manifest = write_shards(stream, folder, advance=advance)
    (folder / "hf_quant_config.json").write_bytes((export / "hf_quant_config.json").read_bytes())
    complete_folder(folder, source, hf_config, manifest, hf_config["quantization_config"])
    return manifest


def check_scales(folder: Path, quant: QuantMap) -> dict[str, Any]:
    """Check that every scale exists and is calibrated; return the smallest and largest value of each kind of scale.
    Raises ModelError naming scales that are missing, not positive and finite, or at the engine's default of 1.0."""
    tensors = TensorFolder(folder)
    wanted = [f"{module}.{kind}" for module in quant.formats for kind in SCALES]
    problems = [f"{scale} is missing" for scale in wanted if scale not in tensors.specs]
    problems += [
        f"{module} is {tensors.specs[f'{module}.weight'].dtype}, expected e4m3"
        for module in quant.formats
        if torch_dtype(tensors.specs[f"{module}.weight"]) is not E4M3
    ]
    ranges: dict[str, tuple[float, float]] = {}
    for scale in tensors.specs:
        kind = scale.rpartition(".")[2]
        if kind in SCALES:
            values = tensors.whole(scale).float()
            least, most = float(values.min()), float(values.max())
            if not (least > 0 and math.isfinite(most)) or bool((values == DEFAULT_SCALE).any()):
                problems.append(f"{scale} lies in [{least:g}, {most:g}]")
            before = ranges.get(kind, (math.inf, 0.0))
            ranges[kind] = (min(least, before[0]), max(most, before[1]))
    if problems:
        raise ModelError(
            f"calibration left scales that no engine should use, positive ones other than {DEFAULT_SCALE} are "
            f"expected: {'; '.join(problems[:5])}; calibrate with other prompts"
        )
    return {kind: dict(min=least, max=most) for kind, (least, most) in sorted(ranges.items())}

"""Post-training quantization with NVIDIA ModelOpt: calibrated FP8 weights, activations and KV cache.

    transformers model ─▶ insert quantizers ─▶ run the calibration rows ─▶ export_hf_checkpoint

    fp8        e4m3 with one scale a matrix, one static scale for its inputs: SGLang's quantization `modelopt_fp8`
    fp8_block  e4m3 with one scale a 128×128 block, activations quantized by the engine; ModelOpt's own 4-D scales are
               stored as `weight_scale_inv`, the layout that SGLang's `fp8` reads

The model is loaded whole: ModelOpt works on torch modules.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from megatron_bridge.hf.folders import complete_folder
from megatron_bridge.hf.shard_writer import Manifest, write_shards
from megatron_bridge.hf.tensor_folder import TensorFolder
from megatron_bridge.hf.tensor_specs import torch_dtype
from pipeline.errors import ModelError
from pipeline.ports.weight_update import TensorSpec
from precision.formats.formats import E4M3
from precision.formats.quant_map import QuantMap
from precision.formats.rollout_format import BLOCK

FORMATS = {"fp8": "FP8_DEFAULT_CFG", "fp8_block": "FP8_2D_BLOCKWISE_WEIGHT_ONLY_CFG"}
SCALES = ("weight_scale", "weight_scale_inv", "input_scale", "k_scale", "v_scale")
DEFAULT_SCALE = 1.0
"""What an engine assumes, without a word, for a scale that nobody calibrated."""


def export_quantized(
    source: Path, folder: Path, rows: Sequence[Sequence[int]], *, name: str, kv_cache: bool, quant: QuantMap
) -> None:
    """Calibrate on token rows and write ModelOpt's export into `folder`. Wants a process of its own: importing
    ModelOpt patches torch, transformers and Megatron."""
    import modelopt.torch.quantization as mtq
    from modelopt.torch.export import export_hf_checkpoint
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(source, dtype="auto").eval()
    rules = list(getattr(mtq, FORMATS[name])["quant_cfg"])
    if kv_cache:
        rules += mtq.FP8_KV_CFG["quant_cfg"]

    def calibrate(instrumented: Any) -> None:
        with torch.no_grad():
            for row in rows:
                instrumented(torch.tensor([list(row)]))

    model = mtq.quantize(model, {"quant_cfg": rules, "algorithm": "max"}, calibrate)
    if name == "fp8":
        _share_scales(model, quant)
    export_hf_checkpoint(model, export_dir=str(folder))


def auto_quantize_scores(model: Any, rows: Sequence[Sequence[int]], name: str) -> list[dict[str, Any]]:
    """ModelOpt's sensitivity of each group of linears that it takes together: dicts of `modules` and `score`, the KL of
    the outputs (nats, summed) with that group alone quantized. `name` is a RolloutFormat.

    Changes `model`. ModelOpt has no scales for 128 channels of a token, so fp8_block's activations have one a token.
    """
    import modelopt.torch.quantization as mtq

    weight: dict[str, Any] = {"num_bits": (4, 3), "axis": None}
    if name == "fp8_block":
        weight["block_sizes"] = {-1: BLOCK[1], -2: BLOCK[0]}
    token = {"num_bits": (4, 3), "axis": None, "type": "dynamic", "block_sizes": {-1: None}}
    rules = [
        {"quantizer_name": "*", "enable": False},
        {"quantizer_name": "*weight_quantizer", "cfg": weight},
        {"quantizer_name": "*input_quantizer", "cfg": token},
    ]
    _, state = mtq.auto_quantize(
        model,
        constraints={"effective_bits": 12.0},  # of no effect on the scores
        quantization_formats=[{"quant_cfg": rules, "algorithm": "max"}],
        data_loader=[torch.tensor([list(row)]) for row in rows],
        forward_step=lambda model, row: model(row).logits,
        disabled_layers=["*lm_head*"],  # which no engine of ours quantizes
        num_calib_steps=len(rows),
        num_score_steps=len(rows),
        method="kl_div",
    )
    return [
        dict(modules=list(one["module_names"]), score=float(max(one["scores"])))
        for one in state["candidate_stats"].values()
        if not any("lm_head" in module for module in one["module_names"])
    ]


def _share_scales(model: Any, quant: QuantMap) -> None:
    """One weight scale for what the engine stacks: otherwise it would round the smaller parts a second time."""
    for group in quant.fused_groups:
        quantizers = [model.get_submodule(module).weight_quantizer for module in group]
        shared = torch.stack([quantizer.amax.max() for quantizer in quantizers]).max()
        for quantizer in quantizers:
            quantizer.amax = shared.clone()


def store_export(
    export: Path, source: Path, folder: Path, hf_config: dict[str, Any], *, name: str, advance: Callable[[int], None]
) -> Manifest:
    """Write ModelOpt's `export` as a folder that SGLang loads, with manifest and tokenizer."""
    tensors = TensorFolder(export)
    stream = ((_stored(old, tensors.specs, name), tensors.pieces(old)) for old in tensors.specs)
    manifest = write_shards(stream, folder, advance=advance)
    quantization = hf_config["quantization_config"]
    if name == "fp8_block":
        kv_cache = {"kv_cache_quant_algo": "FP8"} if quantization.get("kv_cache_scheme") else {}
        quantization = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", **kv_cache}
        quantization["weight_block_size"] = list(BLOCK)
    else:
        (folder / "hf_quant_config.json").write_bytes((export / "hf_quant_config.json").read_bytes())
    complete_folder(folder, source, hf_config, manifest, quantization)
    return manifest


def _stored(name: str, specs: Mapping[str, TensorSpec], format_name: str) -> TensorSpec:
    """ModelOpt writes block scales as [rows, 1, columns, 1], and a single one as a scalar."""
    spec = specs[name]
    if format_name != "fp8_block" or not name.endswith(".weight_scale"):
        return spec
    weight = specs[name.removesuffix("_scale")]
    blocks = tuple(-(-size // block) for size, block in zip(weight.shape, BLOCK, strict=True))
    if math.prod(spec.shape) != math.prod(blocks):
        raise ModelError(f"{name} has shape {list(spec.shape)}, expected {list(blocks)} block scales; report the model")
    return TensorSpec(name=f"{name}_inv", dtype=spec.dtype, shape=blocks)


def check_scales(folder: Path, quant: QuantMap, num_layers: int, *, name: str, kv_cache: bool) -> dict[str, Any]:
    """Smallest and largest value of every kind of scale, after checking that each is there and calibrated.

    Raises ModelError naming scales that are missing, not positive and finite, or at the engine's default of 1.0.
    """
    tensors = TensorFolder(folder)
    kinds = ("weight_scale", "input_scale") if name == "fp8" else ("weight_scale_inv",)
    wanted = [f"{module}.{kind}" for module in quant.formats for kind in kinds]
    if kv_cache:
        prefix = "model.layers.{}.self_attn.{}_proj.{}_scale"
        wanted += [prefix.format(layer, part, part) for layer in range(num_layers) for part in "kv"]
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

"""Describe a model folder from headers and indexes alone: `evenkeel convert inspect`."""

from __future__ import annotations

import math
import re
from collections import Counter
from pathlib import Path
from typing import Any

from launch.convert.folders import description_of
from megatron_bridge.hf.headers import DTYPES, indexed_files, tensor_headers, weight_files
from megatron_bridge.hf.model_config import architecture_of, read_config
from pipeline.errors import CorruptCheckpointError, EvenKeelError, ModelError
from pipeline.trainer.checkpoints import COMMIT, read_commit
from precision.text import listed, one_line, parse_object, quoted

_BITS = {"BF16": 16, "F16": 16, "F32": 32, "F64": 64, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F4": 4, "BOOL": 8}
_EIGHT_BITS_OR_LESS = frozenset({"F8_E4M3", "F8_E5M2", "F4", "I8", "U8"})
_SCALE = re.compile(r"\.(weight_scale(_inv)?|input_scale|[kv]_scale)$")
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")
_MODEL_PREFIXES = ("embedding.", "decoder.", "output_layer.")


Tensors = dict[str, tuple[tuple[int, ...], str]]
"""Shape and safetensors dtype of each tensor, by name."""


def inspect_folder(folder: Path) -> dict[str, Any]:
    """Return kind, architecture, counts and distinct shapes. Raises ModelError or CorruptCheckpointError."""
    if not folder.is_dir():
        raise ModelError(f"{folder} is not a folder; give a model folder, a policy, or a checkpoint")
    is_checkpoint = (folder / ".metadata").exists() or (folder / COMMIT).exists()
    kind, config, tensors, num_files, problems = (_read_checkpoint if is_checkpoint else _read_model)(folder)
    if problems:
        shown = listed([one_line(problem, 120) for problem in problems], 3)
        raise ModelError(f"{folder} ({kind}) is damaged: {shown}; fetch or convert it again")
    weights = {name: header for name, header in tensors.items() if not _SCALE.search(name)}
    sizes = Counter[str]()
    for shape, dtype in tensors.values():
        bits = _BITS.get(dtype) or int("".join(filter(str.isdigit, dtype)) or 8)
        sizes[dtype] += math.prod(shape) * bits // 8
    parameters = sum(math.prod(shape) for shape, _ in weights.values())
    quantized = sum(math.prod(shape) for shape, dtype in weights.values() if dtype in _EIGHT_BITS_OR_LESS)
    # One row for all tensors that differ only in layer or expert.
    rows = Counter((_NUMBER.sub("*", name), *header) for name, header in tensors.items())
    return dict(
        kind=kind,
        architecture=architecture_of(config) or "unknown",
        parameters=parameters,
        tensors=len(tensors),
        bytes=sum(sizes.values()),
        bytes_by_dtype=dict(sorted(sizes.items())),
        quantized_share=round(quantized / max(1, parameters), 4),
        files=num_files,
        shapes=[dict(name=n, shape=list(shape), dtype=dtype, count=count) for (n, shape, dtype), count in rows.items()],
    )


def _read_model(folder: Path) -> tuple[str, dict[str, Any], Tensors, int, list[str]]:
    """Return kind, config.json, tensors, number of files, and differences from the folder's index and manifest."""
    if not (folder / "config.json").exists():
        raise ModelError(
            f"{folder} holds neither config.json (a model) nor .metadata (a distributed checkpoint); give the folder "
            "that does"
        )
    config = read_config(folder)
    headers = tensor_headers(folder)
    if not headers:
        raise ModelError(f"{folder} has no tensors in *.safetensors; convert the weights to safetensors")
    quantization = config.get("quantization_config") or {}
    if not isinstance(quantization, dict):
        raise ModelError(
            f"{folder / 'config.json'}: quantization_config is {quoted(quantization)}, expected an object; fetch the "
            "model again"
        )
    method, kind = quantization.get("quant_method"), "HF"
    if method == "modelopt" or (folder / "hf_quant_config.json").exists():
        kind = f"HF, ModelOpt {one_line(quantization.get('quant_algo', 'quantized'), 60)}"
    elif method == "fp8":
        block = quantization.get("weight_block_size")
        blocks = "×".join(map(str, block)) if isinstance(block, list) else ""
        kind = f"HF, FP8 in {one_line(blocks, 60)} blocks" if blocks else "HF, FP8 with a scale for each tensor"
    elif method:
        kind = f"HF, quantized by {one_line(method, 60)}"

    problems = []
    index, manifest = folder / "model.safetensors.index.json", folder / "manifest.json"
    if index.exists():
        indexed = set(indexed_files(index))
        problems += [f"{name} is in the index, but in no file" for name in sorted(indexed - set(headers))]
        problems += [f"{name} is not in the index" for name in sorted(set(headers) - indexed)]
    if manifest.exists():
        kind += ", with the manifest of a policy"
        try:
            named = {
                name: tuple(entry["shape"]) for name, entry in parse_object(manifest.read_bytes())["tensors"].items()
            }
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            reason = f"{type(error).__name__}: {one_line(error, 200)}"
            raise ModelError(f"{manifest} is damaged ({reason}); convert the model again") from error
        found = {name: header.shape for name, header in headers.items()}
        problems += [
            f"{name} is not as manifest.json says"
            for name in sorted(named.keys() | found.keys())
            if named.get(name) != found.get(name)
        ]
    quantized = [name for name, header in headers.items() if header.dtype == "F8_E4M3"]
    scales = ("_scale", "_scale_inv")
    problems += [f"{name} has no scale" for name in quantized if not any(name + s in headers for s in scales)]
    tensors = {name: (header.shape, header.dtype) for name, header in headers.items()}
    return kind, config, tensors, len(weight_files(folder)), problems


def _read_checkpoint(folder: Path) -> tuple[str, dict[str, Any], Tensors, int, list[str]]:
    from megatron_bridge.checkpoint.dcp import CheckpointIndex

    index = CheckpointIndex(folder)
    names = {dtype: name for name, dtype in DTYPES.items()}
    weights = {
        name: (entry.shape, names[str(entry.dtype).removeprefix("torch.")])
        for name, entry in index.tensors.items()
        if name.startswith(_MODEL_PREFIXES)
    }
    if not weights:
        raise CorruptCheckpointError(
            f"{folder} is a distributed checkpoint without a model's weights; give another one"
        )
    files = list(folder.glob("*.distcp"))
    whole = len(weights) == len(index.tensors)
    kind = "Megatron checkpoint, weights only" if whole else "Megatron checkpoint with optimizer state"
    try:
        config = read_config(description_of(folder))
    except EvenKeelError:
        config = {}  # outside of its run, a checkpoint does not tell its architecture
    if not (folder / COMMIT).exists():
        return kind, config, weights, len(files), [f"{COMMIT} is missing: it was never completed"]
    committed = read_commit(folder).files  # contents are compared when the checkpoint is used
    found = {name: (folder / name).stat().st_size for name in committed if (folder / name).is_file()}
    problems = [
        f"{name} has {found.get(name, 0)} bytes, expected {entry.num_bytes}"
        for name, entry in committed.items()
        if found.get(name) != entry.num_bytes
    ]
    return kind, config, weights, len(files), problems

"""Read the safetensors headers of an HF folder, and compare them with the model's tensors.

Needs neither torch nor Megatron-Core: only values of bfloat16 and FP8 need torch, not their headers.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

from safetensors import SafetensorError, safe_open

from megatron_bridge.hf.model_config import ModelConfig
from pipeline.data.files import read_at_most
from pipeline.errors import ModelError
from precision.text import listed, one_line, parse_object, quoted

_FILE_NAME = re.compile(r"[\w.@+ -]+\.safetensors")
_INDEX_BYTES = 256 << 20
"""Largest model.safetensors.index.json: 100 bytes a tensor, and the largest mixtures have 200,000 tensors."""
_SINGLE = "model.safetensors"
FLOATS = frozenset({"F64", "F32", "F16", "BF16"})

DTYPES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U8": "uint8",
    "BOOL": "bool",
}
"""safetensors' name of a dtype → torch's name, for the dtypes that are read and written."""


class TensorHeader(NamedTuple):
    shape: tuple[int, ...]
    dtype: str
    """The dtype's name in safetensors."""
    file: Path


def check_weights(folder: Path, config: ModelConfig) -> None:
    """Compare the safetensors headers with the model's tensors. Raises ModelError naming wrong tensors and a remedy."""
    found = tensor_headers(folder)
    scales = [name for name in found if name.endswith(".weight_scale_inv")]
    quantized = [name for name, header in found.items() if header.dtype.startswith("F8_")]
    if scales or quantized:
        raise ModelError(
            f"{folder} holds block-quantized FP8 weights ({len(quantized)} e4m3 tensors, {len(scales)} "
            f"weight_scale_inv, such as {(scales or quantized)[0]}), which an engine can serve but a learner cannot "
            "train; give the bf16 folder of this model, and have the rollouts quantized (rollout.precision)"
        )
    expected = config.tensors()
    missing = [name for name in expected if name not in found]
    # Old checkpoints store rotary frequencies; tied models sometimes store the embedding twice.
    unexpected = [name for name in found if name not in expected and not name.endswith("rotary_emb.inv_freq")]
    if config.tied_embeddings and "lm_head.weight" in unexpected:
        unexpected.remove("lm_head.weight")
    problems = [f"{name} is missing" for name in missing]
    problems += [f"{name} is not part of {config.architecture}" for name in unexpected]
    if len(missing) == len(unexpected) == 1 and found[unexpected[0]].shape == expected[missing[0]]:
        problems.append(f"{unexpected[0]} looks like a renamed {missing[0]}")
    for name, (size, dtype, _) in found.items():
        if name in expected and size != expected[name]:
            problems.append(f"{name} has shape {list(size)}, expected {list(expected[name])}")
        elif name in expected and dtype not in FLOATS:
            problems.append(f"{name} is {dtype}, expected one of {', '.join(sorted(FLOATS))}")
    if problems:
        shown = listed([one_line(problem, 120) for problem in problems])
        raise ModelError(
            f"{folder} does not hold the weights that its config.json describes: {shown}; rename or fetch them again"
        )


def tensor_headers(folder: Path) -> dict[str, TensorHeader]:
    """Return the header of every tensor of a folder by name, ordered by file, then by tensor. Raises ModelError."""
    headers: dict[str, TensorHeader] = {}
    for path in weight_files(folder):
        try:
            with safe_open(path, framework="numpy") as file:
                for name in sorted(file.keys()):
                    if name in headers:
                        raise ModelError(
                            f"{folder} holds {name} twice, in {headers[name].file.name} and {path.name}; remove the "
                            "file that is not the model's"
                        )
                    view = file.get_slice(name)
                    headers[name] = TensorHeader(tuple(view.get_shape()), view.get_dtype(), path)
        except (OSError, SafetensorError) as error:
            raise ModelError(
                f"{path} is not a readable safetensors file ({one_line(error, 200)}); fetch the model again"
            ) from error
    return headers


def weight_files(folder: Path) -> list[Path]:
    """Return the safetensors files of a model folder: those in its index, or all without one. Raises ModelError."""
    index = folder / "model.safetensors.index.json"
    if not index.exists():
        return sorted(folder.glob("*.safetensors"))
    names = sorted(set(indexed_files(index).values()))
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise ModelError(
            f"{folder} lacks {listed(missing, between=', ')}, which its index names; fetch the model again"
        )
    if (folder / _SINGLE).is_file() and _SINGLE not in names:
        raise ModelError(
            f"{folder} holds {_SINGLE}, which transformers reads, and {index.name}, which names "
            f"{listed(names, most=2)} instead; remove the one that is not the model's"
        )
    return [folder / name for name in names]


def indexed_files(index: Path) -> dict[str, str]:
    """Return tensor → file name from model.safetensors.index.json. Raises ModelError."""
    try:
        found = parse_object(read_at_most(index, _INDEX_BYTES)).get("weight_map")
    except OSError as error:
        raise ModelError(f"cannot read {index}: {error.strerror}; fetch the model again") from error
    except ValueError as error:
        raise ModelError(f"{index} is damaged: {error}; fetch the model again") from None
    if not isinstance(found, dict):
        raise ModelError(
            f"{index} is damaged: weight_map is {quoted(found)}, expected an object; fetch the model again"
        )
    for name, file in found.items():
        if not isinstance(file, str) or not _FILE_NAME.fullmatch(file):
            raise ModelError(
                f"{index} is damaged: the file of {quoted(name)} is {quoted(file)}, expected a *.safetensors beside "
                "it; fetch the model again"
            )
    return found

"""The tensors of an HF folder as their safetensors headers describe them. Needs neither torch nor Megatron-Core."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from safetensors import SafetensorError, safe_open

from megatron_bridge.hf.model_config import ModelConfig
from pipeline.errors import ModelError

_FLOATS = frozenset({"F64", "F32", "F16", "BF16"})


def check_weights(folder: Path, shape: ModelConfig) -> None:
    """Compare the headers of a folder's safetensors with what the model needs.

    Raises ModelError, one line that names what is missing, unexpected or of another shape, and what to do.
    """
    found = tensor_headers(folder)
    _refuse_quantized(folder, found)
    expected = shape.tensors()
    missing = [name for name in expected if name not in found]
    unexpected = [name for name in found if name not in expected and not _may_be_ignored(name, shape)]
    problems = [f"{name} is missing" for name in missing]
    problems += [f"{name} is not part of {shape.architecture}" for name in unexpected]
    if len(missing) == len(unexpected) == 1 and found[unexpected[0]][0] == expected[missing[0]]:
        problems.append(f"{unexpected[0]} looks like a renamed {missing[0]}")
    for name, (size, dtype) in found.items():
        if name in expected and size != expected[name]:
            problems.append(f"{name} has shape {list(size)}, expected {list(expected[name])}")
        elif name in expected and dtype not in _FLOATS:
            problems.append(f"{name} is {dtype}, expected one of {', '.join(sorted(_FLOATS))}")
    if problems:
        shown = "; ".join(problems[:5]) + (f"; and {len(problems) - 5} more" if len(problems) > 5 else "")
        raise ModelError(
            f"{folder} does not hold the weights that its config.json describes: {shown}; rename or fetch them again"
        )


def tensor_headers(folder: Path) -> dict[str, tuple[tuple[int, ...], str]]:
    """name → (shape, safetensors dtype) of every tensor in a folder, from the headers only. Raises ModelError."""
    headers: dict[str, tuple[tuple[int, ...], str]] = {}
    for path in weight_files(folder):
        try:
            with safe_open(path, framework="numpy") as file:
                for name in file.keys():  # noqa: SIM118 (not a dict)
                    view = file.get_slice(name)
                    headers[name] = (tuple(view.get_shape()), view.get_dtype())
        except (OSError, SafetensorError) as error:
            raise ModelError(f"{path} is not a readable safetensors file ({error}); fetch the model again") from error
    return headers


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a model folder: those that its index names, or all. Raises ModelError."""
    index = folder / "model.safetensors.index.json"
    if not index.exists():
        return sorted(folder.glob("*.safetensors"))
    try:
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    except (ValueError, KeyError, AttributeError) as error:
        raise ModelError(f"{index} is damaged ({error}); fetch the model again") from error
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise ModelError(f"{folder} lacks {', '.join(missing)}, which its index names; fetch the model again")
    return [folder / name for name in names]


def _refuse_quantized(folder: Path, found: Mapping[str, tuple[tuple[int, ...], str]]) -> None:
    scales = [name for name in found if name.endswith(".weight_scale_inv")]
    quantized = [name for name, (_, dtype) in found.items() if dtype.startswith("F8_")]
    if scales or quantized:
        raise ModelError(
            f"{folder} holds block-quantized FP8 weights ({len(quantized)} e4m3 tensors, {len(scales)} "
            f"weight_scale_inv, such as {(scales or quantized)[0]}), which an engine can serve but a learner cannot "
            "train; give the bf16 folder of this model, and have the rollouts quantized (rollout.precision)"
        )


def _may_be_ignored(name: str, shape: ModelConfig) -> bool:
    """Old checkpoints store rotary frequencies; tied ones sometimes store the embedding twice."""
    return name.endswith("rotary_emb.inv_freq") or (shape.tied_embeddings and name == "lm_head.weight")

"""The tensors of an HF folder as their safetensors headers describe them. Needs neither torch nor Megatron-Core."""

from __future__ import annotations

import json
from pathlib import Path

from safetensors import SafetensorError, safe_open

from megatron_bridge.shape import ModelShape
from pipeline.errors import ModelError

_FLOATS = frozenset({"F64", "F32", "F16", "BF16"})


def check_weights(folder: Path, shape: ModelShape) -> None:
    """Compare the headers of a folder's safetensors with what the model needs. Raises ModelError."""
    found = tensor_headers(folder)
    expected = shape.tensors()
    problems = [f"{name} is missing" for name in expected if name not in found]
    for name, (size, dtype) in found.items():
        if name not in expected:
            if not _may_be_ignored(name, shape):
                problems.append(f"{name} is not part of {shape.architecture}")
        elif size != expected[name]:
            problems.append(f"{name} has shape {list(size)}, expected {list(expected[name])}")
        elif dtype not in _FLOATS:
            problems.append(f"{name} is {dtype}, expected one of {', '.join(sorted(_FLOATS))}")
    if problems:
        shown = "; ".join(problems[:5]) + (f"; and {len(problems) - 5} more" if len(problems) > 5 else "")
        raise ModelError(f"{folder} does not hold the weights that its config.json describes: {shown}")


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


def _may_be_ignored(name: str, shape: ModelShape) -> bool:
    """Old checkpoints store rotary frequencies; tied ones sometimes store the embedding twice."""
    return name.endswith("rotary_emb.inv_freq") or (shape.tied_embeddings and name == "lm_head.weight")

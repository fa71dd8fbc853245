"""Writes a policy: a folder that SGLang and transformers load, with a manifest that says exactly what it holds.

    config.json  tokenizer files  model-00001.safetensors …  model.safetensors.index.json  manifest.json

Written under a temporary name, synced, then renamed: a policy folder is complete or absent.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from megatron_bridge.hf.headers import weight_files
from megatron_bridge.hf.model_config import read_hf_config
from megatron_bridge.hf.sidecars import copy_companions, sync_tree, write_index, write_json
from pipeline.data.run_directory import fsync_directory
from pipeline.ports.weight_check import ChecksumRecorder
from precision.formats.quant_map import QuantMap, quantize_state
from precision.formats.quantize import quantize_block

SHARD_BYTES = 4 << 30
"""Bytes of tensors in one safetensors file, at most (one tensor may be larger)."""


def write_policy(
    named_tensors: Iterable[tuple[str, Tensor]],
    source_folder: Path,
    target: Path,
    quant: QuantMap | None,
    *,
    digests: ChecksumRecorder | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write `named_tensors` (HF names, the whole model) as the policy folder `target`, replacing one that is there.

    config.json and the tokenizer come from `source_folder`; `quant` converts weights to the rollout's formats, and
    `digests` observes what is written.
    manifest.json holds `{"tensors": {name: {"file", "shape", "dtype", "sha256"}}}`, the digest being that of the
    tensor's bytes. Needs no Megatron and no process group.
    """
    temporary = target.with_name(f"{target.name}.tmp-{os.getpid()}")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    stream = named_tensors if quant is None else quantize_state(named_tensors, quant, quantize_block)
    if digests is not None:
        stream = digests.watch(stream)
    manifest = write_shards(stream, temporary, shard_bytes=shard_bytes)
    complete_policy(temporary, target, manifest, source_folder, quant)


def complete_policy(
    temporary: Path,
    target: Path,
    manifest: Mapping[str, Mapping[str, Any]],
    source_folder: Path,
    quant: QuantMap | None,
) -> None:
    """Add everything but the weights to a folder that holds the shards of `manifest`, sync it, give it its name."""
    config = _config(source_folder, quant)
    write_index(temporary, manifest)
    write_json(temporary / "manifest.json", {"tensors": manifest})
    write_json(temporary / "config.json", config | {"dtype": manifest["model.norm.weight"]["dtype"]})
    copy_companions(source_folder, temporary)
    sync_tree(temporary)
    _replace(temporary, target)


def hf_tensors(folder: Path) -> Iterator[tuple[str, Tensor]]:
    """The tensors of an HF folder one by one, by name. Raises ModelError for a damaged folder."""
    for path in weight_files(folder):
        with safe_open(path, framework="pt") as file:
            for name in sorted(file.keys()):
                yield name, file.get_tensor(name)


def _config(source_folder: Path, quant: QuantMap | None) -> dict[str, Any]:
    config = read_hf_config(source_folder)
    config.pop("torch_dtype", None)  # the older name of `dtype`
    quantization = None if quant is None else quant.to_hf_quantization_config()
    return config if quantization is None else config | {"quantization_config": quantization}


def write_shards(
    stream: Iterable[tuple[str, Tensor]], folder: Path, *, shard_bytes: int = SHARD_BYTES, prefix: str = "model"
) -> dict[str, dict[str, Any]]:
    """Write the tensors as `<prefix>-00001.safetensors` …; returns the manifest of what was written, by name."""
    manifest: dict[str, dict[str, Any]] = {}
    shard: dict[str, Tensor] = {}
    size = count = 0

    def close() -> None:
        nonlocal size, count
        count += 1
        name = f"{prefix}-{count:05}.safetensors"
        save_file(shard, folder / name, metadata={"format": "pt"})
        for tensor in shard:
            manifest[tensor]["file"] = name
        shard.clear()
        size = 0

    for name, tensor in stream:
        kept = tensor.detach().to("cpu", copy=True).contiguous()  # an exporter may reuse the memory
        if shard and size + kept.nbytes > shard_bytes:
            close()
        manifest[name] = {
            "shape": list(kept.shape),
            "dtype": str(kept.dtype).removeprefix("torch."),
            "bytes": kept.nbytes,
            "sha256": tensor_digest(kept),
        }
        shard[name] = kept
        size += kept.nbytes
    close()
    return manifest


def tensor_digest(tensor: Tensor) -> str:
    """sha256 of a CPU tensor's bytes in C order."""
    return hashlib.sha256(tensor.contiguous().flatten().view(torch.uint8).numpy().data).hexdigest()


def _replace(folder: Path, target: Path) -> None:
    """Directories cannot be replaced in one step: the old one steps aside first."""
    aside = target.with_name(f"{target.name}.old-{os.getpid()}")
    if target.exists():
        target.rename(aside)
    folder.rename(target)
    fsync_directory(target.parent)
    shutil.rmtree(aside, ignore_errors=True)

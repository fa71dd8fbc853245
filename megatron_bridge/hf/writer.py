"""Writes a policy: a folder that SGLang and transformers load, with a manifest that says exactly what it holds.

Written under a temporary name, synced, then renamed: a policy folder is complete or absent.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from megatron_bridge.hf.folders import complete_folder, replace_folder, write_manifest
from megatron_bridge.hf.model_config import read_hf_config
from megatron_bridge.hf.shard_writer import SHARD_BYTES, Manifest, whole_tensors, write_shards
from pipeline.data.files import require_space, size_of, temporary_name
from pipeline.data.quant_maps import write_quant_map
from pipeline.data.run_directory import unfenced
from pipeline.ports.weights import ChecksumRecorder
from precision.formats.quant_map import QuantMap
from precision.formats.quantize import quantize_block
from precision.formats.streams import quantize_state


def write_policy(
    named_tensors: Iterable[tuple[str, Tensor]],
    source_folder: Path,
    target: Path,
    quant: QuantMap | None,
    *,
    digests: ChecksumRecorder | None = None,
    beside: Callable[[Path], None] | None = None,
    shard_bytes: int = SHARD_BYTES,
    fence: Callable[[], None] = unfenced,
) -> None:
    """Write `named_tensors` (HF names, the whole model) as the policy folder `target`, replacing one that is there.

    config.json and the tokenizer come from `source_folder`; `quant` converts weights to the rollout's formats, and
    `digests` observes what is written. `beside` writes more files into the folder before it gets its name, which
    stand in place of those of `source_folder`.
    manifest.json holds `{"tensors": …}`, a `shard_writer.Manifest`. Needs no Megatron and no process group.
    """
    weights = write_weights(named_tensors, source_folder, target, quant, digests=digests, shard_bytes=shard_bytes)
    weights.complete(beside, fence)


@dataclass(frozen=True)
class WrittenWeights:
    """The weights of a policy folder that has no name yet."""

    temporary: Path
    target: Path
    manifest: Manifest
    source_folder: Path
    quant: QuantMap | None

    def complete(self, beside: Callable[[Path], None] | None, fence: Callable[[], None] = unfenced) -> None:
        """Add what `write_policy` says, and give the folder its name. All of it is read and synced, which may take
        many minutes. It is removed on failure."""
        try:
            if beside is not None:
                beside(self.temporary)
            complete_policy(self.temporary, self.target, self.manifest, self.source_folder, self.quant, fence)
        except BaseException:
            self.remove()
            raise

    def remove(self) -> None:
        """On a full disk it would be in its own way."""
        shutil.rmtree(self.temporary, ignore_errors=True)


def write_weights(
    named_tensors: Iterable[tuple[str, Tensor]],
    source_folder: Path,
    target: Path,
    quant: QuantMap | None,
    *,
    digests: ChecksumRecorder | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> WrittenWeights:
    """The first part of `write_policy`."""
    require_space(target.parent, expected_bytes(target, source_folder, quant), f"the weights in {target.name}")
    temporary = temporary_name(target)
    temporary.mkdir(parents=True)
    stream = named_tensors if quant is None else quantize_state(named_tensors, quant, quantize_block)
    if digests is not None:
        stream = digests.watch(stream)
    try:
        manifest = write_shards(whole_tensors(stream), temporary, shard_bytes=shard_bytes)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    return WrittenWeights(temporary, target, manifest, source_folder, quant)


def complete_delta(
    temporary: Path,
    target: Path,
    manifest: Mapping[str, Mapping[str, Any]],
    quant: QuantMap | None,
    fence: Callable[[], None],
) -> None:
    """As `complete_policy`, for a folder that holds only what changed (pipeline.data.deltas)."""
    if quant is not None:
        write_quant_map(temporary, quant.to_file())
    write_manifest(temporary, manifest)
    replace_folder(temporary, target, fence)


def expected_bytes(target: Path, source_folder: Path, quant: QuantMap | None) -> int:
    """As many as the largest version before has (a delta is smaller than what is written whole); of the first, those of
    the source. Quantized ones are not known before."""
    before = [path for path in target.parent.glob("[0-9]*") if path.is_dir() and target.name.isdigit()]
    if before:
        return max(size_of(path) for path in before)
    return sum(path.stat().st_size for path in source_folder.glob("*.safetensors")) if quant is None else 0


def complete_policy(
    temporary: Path,
    target: Path,
    manifest: Mapping[str, Mapping[str, Any]],
    source_folder: Path,
    quant: QuantMap | None,
    fence: Callable[[], None],
) -> None:
    """Add everything but the weights to a folder that holds the shards of `manifest`, sync it, give it its name."""
    quantization = None
    if quant is not None:
        quantization = quant.to_hf_quantization_config()
        write_quant_map(temporary, quant.to_file())
    complete_folder(temporary, source_folder, read_hf_config(source_folder), manifest, quantization)
    replace_folder(temporary, target, fence)

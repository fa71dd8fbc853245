"""Write Hugging Face model folders that are complete under their name or absent, and the policy folders of a run.

config.json  tokenizer files  model-00001.safetensors …  model.safetensors.index.json  manifest.json  SHA256SUMS
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from megatron_bridge.hf.model_config import read_hf_config
from megatron_bridge.hf.tensor_files import SHARD_BYTES, Manifest, whole_tensors, write_shards
from megatron_bridge.parallel.rank_sync import RankSync, taking
from pipeline.background import tell_when_done
from pipeline.data.checksums import list_checksums, sync_files
from pipeline.data.files import fsync_directory, is_temporary, make_folder, require_space, size_of, temporary_name
from pipeline.data.quant_maps import write_quant_map
from pipeline.data.run_directory import unfenced
from pipeline.errors import EvenKeelError, ModelError
from precision.formats.quant_map import QuantMap
from precision.formats.streams import quantize_state

if TYPE_CHECKING:
    from rollout_sglang.weights.expected_checksums import ExpectedChecksums

COMPANION_FILES = (
    *("tokenizer*", "vocab*", "merges*", "special_tokens_map.json", "added_tokens.json", "chat_template*"),
    "generation_config.json",
)
_STALE_S = 24 * 3600.0


@contextmanager
def new_folder(target: Path) -> Iterator[Path]:
    """Yield a folder to fill. It gets the name `target` if the block succeeds, and is removed otherwise. Raises
    ModelError if `target` is taken, before the block or after it. Leftovers of processes killed at least a day ago are
    removed; younger ones may belong to a running process, here or on another host."""
    check_free(target)
    for stale in target.parent.glob(f".{target.name}.*"):
        if not is_temporary(stale.name):
            continue
        with suppress(FileNotFoundError):  # another process may remove it meanwhile
            written = max(path.stat().st_mtime for path in (stale, *stale.rglob("*")))
            if time.time() - written > _STALE_S:
                shutil.rmtree(stale, ignore_errors=True)
    make_folder(target.parent)
    temporary = temporary_name(target)
    temporary.mkdir()
    try:
        yield temporary
        list_checksums(temporary)
        sync_files([*temporary.rglob("*"), temporary])
        check_free(target)
        temporary.rename(target)  # fails if files appeared since the check
        fsync_directory(target.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def check_free(target: Path) -> None:
    """Raise ModelError unless `target` does not exist or is an empty folder."""
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ModelError(f"{target} exists and is not an empty folder; remove it or name another one")


def replace_folder(temporary: Path, target: Path, fence: Callable[[], None] = unfenced) -> None:
    """List a folder's checksums, make it durable and rename it to `target`, replacing any folder there. `fence` is
    called before the rename; it raises if this process may not write anymore."""
    list_checksums(temporary)
    sync_files([*temporary.rglob("*"), temporary])
    try:
        fence()
    except EvenKeelError:
        shutil.rmtree(temporary, ignore_errors=True)  # an unnamed folder must not fill the disk
        raise
    # A folder cannot be replaced in one step: the old one is moved aside first.
    aside = temporary_name(target)
    if target.exists():
        target.rename(aside)
    temporary.rename(target)
    fsync_directory(target.parent)
    shutil.rmtree(aside, ignore_errors=True)


def complete_folder(
    folder: Path,
    source: Path,
    hf_config: Mapping[str, Any],
    manifest: Mapping[str, Mapping[str, Any]],
    quantization: Mapping[str, Any] | None = None,
) -> None:
    """Add the missing files to a folder of shards: index, manifest, config.json, and the tokenizer files of `source`.
    `quantization` is the `quantization_config` of the new config.json; None keeps that of `hf_config`, if any."""
    index = {
        "metadata": {"total_size": sum(entry["bytes"] for entry in manifest.values())},
        "weight_map": {name: entry["file"] for name, entry in manifest.items()},
    }
    _write_json(folder / "model.safetensors.index.json", index)
    _write_json(folder / "manifest.json", {"tensors": manifest})
    stored = {} if quantization is None else {"quantization_config": quantization}
    describe_folder(folder, source, {**hf_config, **stored}, manifest["model.norm.weight"]["dtype"])


def describe_folder(folder: Path, source: Path, hf_config: Mapping[str, Any], dtype: str) -> None:
    """Add config.json for weights of `dtype` (torch's name), and those tokenizer and generation files of `source` that
    the folder lacks. `torch_dtype`, the older name of config.json's `dtype`, is left out."""
    kept = {key: value for key, value in hf_config.items() if key != "torch_dtype"}
    _write_json(folder / "config.json", kept | {"dtype": dtype})
    for path in sorted({path for pattern in COMPANION_FILES for path in source.glob(pattern)}):
        if path.is_file() and not (folder / path.name).exists():
            shutil.copyfile(path, folder / path.name)


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")


def write_policy(
    named_tensors: Iterable[tuple[str, Tensor]],
    source_folder: Path,
    target: Path,
    quant: QuantMap | None,
    *,
    digests: ExpectedChecksums | None = None,
    beside: Callable[[Path], None] | None = None,
    shard_bytes: int = SHARD_BYTES,
    fence: Callable[[], None] = unfenced,
) -> None:
    """Write `named_tensors` (HF names, the whole model) as the policy folder `target`, replacing an existing one.
    config.json and the tokenizer come from `source_folder`; `quant` converts weights to the rollout's formats, and
    `digests` observes the written tensors. `beside` writes more files into the unnamed folder, in place of those of
    `source_folder`. manifest.json holds `{"tensors": …}`, a `tensor_files.Manifest`. Needs no process group."""
    weights = write_weights(named_tensors, source_folder, target, quant, digests=digests, shard_bytes=shard_bytes)
    complete_weights(weights, target, source_folder, quant, beside, fence)


Written = tuple[Path, Manifest]
"""The folder and the manifest of a policy's weights, before the folder gets its name."""


def write_weights(
    named_tensors: Iterable[tuple[str, Tensor]],
    source_folder: Path,
    target: Path,
    quant: QuantMap | None,
    *,
    digests: ExpectedChecksums | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> Written:
    """Write the weights of a policy folder: the first part of `write_policy`."""
    require_space(target.parent, expected_bytes(target, source_folder, quant), f"the weights in {target.name}")
    temporary = temporary_name(target)
    temporary.mkdir(parents=True)
    stream = named_tensors if quant is None else quantize_state(named_tensors, quant)
    if digests is not None:
        stream = digests.watch(stream)
    try:
        return temporary, write_shards(whole_tensors(stream), temporary, shard_bytes=shard_bytes)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)  # on a full disk it would block the next attempt
        raise


def complete_weights(
    weights: Written,
    target: Path,
    source_folder: Path,
    quant: QuantMap | None,
    beside: Callable[[Path], None] | None,
    fence: Callable[[], None],
) -> None:
    """Add the other files of `write_policy` and name the folder, or remove it on failure. May take many minutes."""
    temporary, manifest = weights
    try:
        if beside is not None:
            beside(temporary)
        complete_policy(temporary, target, manifest, source_folder, quant, fence)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def expected_bytes(target: Path, source_folder: Path, quant: QuantMap | None) -> int:
    """Return the size of the largest version before (a delta is smaller than a whole version), or of the source for the
    first. 0 for a first quantized version, whose size is unknown."""
    before = [path for path in target.parent.glob("[0-9]*") if path.is_dir() and target.name.isdigit()]
    if before:
        return max(map(size_of, before))
    return sum(path.stat().st_size for path in source_folder.glob("*.safetensors")) if quant is None else 0


def complete_policy(
    temporary: Path,
    target: Path,
    manifest: Mapping[str, Mapping[str, Any]],
    source_folder: Path,
    quant: QuantMap | None,
    fence: Callable[[], None],
    *,
    is_whole: bool = True,
) -> None:
    """Add everything but the weights to a folder with the shards of `manifest`, sync it and name it. A folder that is
    not whole holds only changes (pipeline.data.deltas), and gets neither config nor tokenizer."""
    if quant is not None:
        write_quant_map(temporary, quant.to_file())
    if is_whole:
        quantization = None if quant is None else quant.to_hf_quantization_config()
        complete_folder(temporary, source_folder, read_hf_config(source_folder), manifest, quantization)
    else:
        _write_json(temporary / "manifest.json", {"tensors": manifest})
    replace_folder(temporary, target, fence)


def export_policy(
    tensors: Iterator[tuple[str, Tensor]],
    model_folder: Path,
    folder: Path,
    rank_sync: RankSync,
    *,
    fence: Callable[[], None],
    quant: QuantMap | None = None,
    digests: ExpectedChecksums | None = None,
    beside: Callable[[Path], None] | None = None,
) -> None:
    """Write named HF tensors, with config and tokenizer of `model_folder`, as the policy folder `folder`. `digests` and
    `beside` are as in `write_policy`. Collective: each tensor is gathered from all ranks when it is requested, so every
    rank exhausts `tensors`. An error on one rank is raised on every rank, after all have finished gathering. Then rank
    0 hashes and syncs the folder, which for a large model takes longer than one collective may wait."""
    written: list[Written] = []

    def take() -> None:
        with taking(tensors):
            if rank_sync.is_rank_zero:
                written.append(write_weights(tensors, model_folder, folder, quant, digests=digests))

    try:
        rank_sync.gather(take)
    except BaseException:
        for temporary, _ in written:
            shutil.rmtree(temporary, ignore_errors=True)
        raise
    tell_when_done(rank_sync, lambda: complete_weights(written[0], folder, model_folder, quant, beside, fence))

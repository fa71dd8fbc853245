"""A new Hugging Face model folder: complete under its name, or absent.

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
from pipeline.data.files import fsync_directory, is_temporary, require_space, size_of, temporary_name
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
    """A folder to fill, which gets the name `target` when the block ends well, and is removed when it does not.

    Raises ModelError when `target` is taken, before the block or after it. What processes left behind that were killed
    a day ago or more is removed here; a younger one may still be at work, here or on another host.
    """
    check_free(target)
    for stale in target.parent.glob(f".{target.name}.*"):
        if not is_temporary(stale.name):
            continue
        with suppress(FileNotFoundError):  # another process may remove it meanwhile
            written = max(path.stat().st_mtime for path in (stale, *stale.rglob("*")))
            if time.time() - written > _STALE_S:
                shutil.rmtree(stale, ignore_errors=True)
    temporary = temporary_name(target)
    temporary.mkdir(parents=True)
    try:
        yield temporary
        list_checksums(temporary)
        sync_files([*temporary.rglob("*"), temporary])
        check_free(target)
        temporary.rename(target)  # fails where files appeared since the check
        fsync_directory(target.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def check_free(target: Path) -> None:
    """Raise ModelError unless `target` does not exist or is an empty folder."""
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ModelError(f"{target} exists and is not an empty folder; remove it or name another one")


def replace_folder(temporary: Path, target: Path, fence: Callable[[], None] = unfenced) -> None:
    """List the checksums of a folder's files, make it durable and give it the name `target`, whatever has that name
    now. `fence` is called before that; it raises where this process may write no more."""
    list_checksums(temporary)
    sync_files([*temporary.rglob("*"), temporary])
    try:
        fence()
    except EvenKeelError:
        shutil.rmtree(temporary, ignore_errors=True)  # what gets no name must not fill the disk
        raise
    # Folders cannot be replaced in one step: the old one steps aside first.
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
    """Add what a folder of shards still lacks: index, manifest, config.json, and the tokenizer files of `source`.

    `quantization` is the `quantization_config` of the new config.json; None leaves that of `hf_config`, if it has one.
    """
    index = {
        "metadata": {"total_size": sum(entry["bytes"] for entry in manifest.values())},
        "weight_map": {name: entry["file"] for name, entry in manifest.items()},
    }
    _write_json(folder / "model.safetensors.index.json", index)
    _write_json(folder / "manifest.json", {"tensors": manifest})
    stored = {} if quantization is None else {"quantization_config": quantization}
    describe_folder(folder, source, {**hf_config, **stored}, manifest["model.norm.weight"]["dtype"])


def describe_folder(folder: Path, source: Path, hf_config: Mapping[str, Any], dtype: str) -> None:
    """Add config.json for weights of `dtype` (as torch names it), and the tokenizer and generation files of `source`
    that the folder does not have yet.

    `torch_dtype`, the older name of config.json's `dtype`, is left out.
    """
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
    """Write `named_tensors` (HF names, the whole model) as the policy folder `target`, replacing one that is there.

    config.json and the tokenizer come from `source_folder`; `quant` converts weights to the rollout's formats, and
    `digests` observes what is written. `beside` writes more files into the folder before it gets its name, which
    stand in place of those of `source_folder`.
    manifest.json holds `{"tensors": …}`, a `shard_writer.Manifest`. Needs no Megatron and no process group.
    """
    weights = write_weights(named_tensors, source_folder, target, quant, digests=digests, shard_bytes=shard_bytes)
    complete_weights(weights, target, source_folder, quant, beside, fence)


Written = tuple[Path, Manifest]
"""The weights of a policy folder that has no name yet: where they are, and what they are."""


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
        shutil.rmtree(temporary, ignore_errors=True)  # on a full disk it would be in its own way
        raise


def complete_weights(
    weights: Written,
    target: Path,
    source_folder: Path,
    quant: QuantMap | None,
    beside: Callable[[Path], None] | None,
    fence: Callable[[], None],
) -> None:
    """Add the rest of what `write_policy` says, and give the folder its name. All of it is read and synced, which may
    take many minutes. It is removed on failure."""
    temporary, manifest = weights
    try:
        if beside is not None:
            beside(temporary)
        complete_policy(temporary, target, manifest, source_folder, quant, fence)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


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
    *,
    is_whole: bool = True,
) -> None:
    """Add everything but the weights to a folder that holds the shards of `manifest`, sync it, give it its name. One
    that is not whole holds only what changed (pipeline.data.deltas), and gets neither config nor tokenizer."""
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
    """Write named HF tensors, with config and tokenizer of `model_folder`, as the policy folder `folder`; `digests` and
    `beside` as in `write_policy`.

    Collective: each tensor is gathered from all ranks when it is asked for, so every rank exhausts `tensors`. What
    fails on one rank is raised on every rank, after all ranks have finished gathering. Then rank 0 hashes and syncs the
    whole folder, which for a large model takes longer than the others may wait in one collective.
    """
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

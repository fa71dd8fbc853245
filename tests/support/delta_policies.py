"""Policy folders with weights and deltas, written without a learner."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file

from pipeline.data.checksums import list_checksums
from pipeline.data.deltas import INDEX_FILE, Delta, DeltaWriter, state_of
from pipeline.data.files import temporary_name
from pipeline.data.run_directory import numbered
from pipeline.ports.weights import WeightCheck

Tensors = Mapping[str, NDArray[np.uint8]]
NAMES = ("model.embed_tokens.weight", "model.layers.0.mlp.up_proj.weight", "model.norm.weight")


def drawn(seed: int, count: int = 5000) -> dict[str, NDArray[np.uint8]]:
    """Tensors of random bytes."""
    rng = np.random.default_rng(seed)
    return {name: rng.integers(0, 256, count + index, dtype=np.uint8) for index, name in enumerate(NAMES)}


def moved(
    tensors: Tensors, seed: int, share: float = 0.01, names: tuple[str, ...] = NAMES
) -> dict[str, NDArray[np.uint8]]:
    """The tensors after a step that changes a share of their bytes."""
    rng = np.random.default_rng(seed)
    after = {name: tensor.copy() for name, tensor in tensors.items()}
    for name in names:
        after[name][rng.random(len(after[name])) < share] ^= 1
    return after


def manifest_of(tensors: Tensors) -> dict[str, dict[str, object]]:
    return {
        name: dict(shape=list(one.shape), dtype="uint8", bytes=one.nbytes, sha256=hashlib.sha256(one).hexdigest())
        for name, one in tensors.items()
    }


def write_version(
    policies: Path, version: int, tensors: Tensors, *, base: tuple[int, Tensors] | None = None, whole: bool = False
) -> Path:
    """A version: its weights where it is `whole` or has no `base`, and what changed of the version and tensors of the
    `base`. Like a learner's it is there at once: whoever follows the run sees no half of it."""
    published = policies / numbered(version)
    folder = temporary_name(published)
    folder.mkdir(parents=True)
    manifest = manifest_of(tensors)
    (folder / "manifest.json").write_text(json.dumps({"tensors": manifest}))
    (folder / "config.json").write_text("{}")
    if base is not None:
        writer = DeltaWriter(folder, 0)
        for name, tensor in tensors.items():
            writer.add(name, base[1][name], tensor, 1)
        state = state_of(manifest_of(base[1]))
        Delta(version=version, base=base[0], base_state=state, widths=writer.widths, payloads=writer.payloads).save(
            folder
        )
    if whole or base is None:
        save_file(dict(tensors), folder / "model-00001.safetensors")
        (folder / INDEX_FILE).write_text("{}")
    WeightCheck(version=version).save(folder)
    list_checksums(folder)
    return folder.rename(published)

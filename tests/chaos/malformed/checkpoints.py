"""Checkpoints whose COMMIT, index, state or shards are something else, and foreign names beside them."""

from __future__ import annotations

import atexit
import json
import math
import os
import pickle
import random
import shutil
import tempfile
import warnings
from functools import cache
from pathlib import Path
from typing import Any

from launch.convert.folders import check_committed
from launch.convert.inspect import inspect_folder
from pipeline.data.checksums import seal, unseal, write_sealed
from pipeline.errors import EvenKeelError
from pipeline.trainer.checkpoints import COMMIT, Checkpoints
from tests.chaos.malformed.mutations import judged, mutated_bytes, mutated_data
from tests.support.one_rank import OneRank

COUNT = 1000
IN_MAKE_TEST = 20
_INDEX = ".metadata"
_STRANGERS = (
    "000003.bak", "000009.tmp", "latest", "000004.zip", "٠٠٠٠٠٤", "0000000000000000000000000000000000000000099",
    "9" * 200,
    ".000005.x.tmp", "000005 ", "-00005", "a\nb", "\x1b[2J", "000006.", "+00007",
)  # fmt: skip


_COMMITS = (
    b"",
    b"{}",
    b"[]",
    b"null",
    b'{"files": {}}',
    b'{"files": []}',
    b'{"step": 4}',
    b'{"step": 4, "files": {"../../x": {"bytes": 1, "sha256": ""}}}',
    b"\0" * 300,
)


def _sealed_or_not(rng: random.Random, data: bytes) -> bytes:
    return seal(f"{data.decode()}\n").encode() if rng.random() < 0.7 else data


class Learner(OneRank):
    """Loads what a learner would read of its checkpoint before Megatron does."""

    def __init__(self, state: Path) -> None:
        self._state = state

    def save(self, directory: Path) -> None:
        shutil.copytree(self._state, directory, dirs_exist_ok=True)

    def load(self, directory: Path) -> None:
        from megatron_bridge.checkpoint.dcp import CheckpointIndex

        index = CheckpointIndex(directory)
        for name in index.tensors:
            index.read(name)


def prepare() -> None:
    """Makes the checkpoints that the tries change."""
    _good()


@cache
def _good() -> Path:
    """Two small distributed checkpoints, committed as a run's are. They live as long as the process."""
    import torch
    import torch.distributed.checkpoint as dcp

    root = Path(tempfile.mkdtemp(prefix="evenkeel-checkpoints-"))
    atexit.register(shutil.rmtree, root, ignore_errors=True)
    state = {"decoder.layers.w": torch.arange(12.0).reshape(3, 4), "embedding.e": torch.ones(5, 2), "step": 3}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it saves in one process
        dcp.save(state, checkpoint_id=str(root / "state"), no_dist=True)
    (root / "run" / "checkpoints").mkdir(parents=True)
    for step in (2, 4):
        Checkpoints(root / "run" / "checkpoints", keep=5).save(Learner(root / "state"), step, {"lr": 0.5})
    return root


def attempt(seed: int, folder: Path) -> str:
    """Change what lies in a folder of checkpoints, and resume from it, inspect it and check it."""
    rng = random.Random(f"checkpoints/{seed}")
    checkpoints = folder / "checkpoints"
    shutil.copytree(_good() / "run" / "checkpoints", checkpoints)
    newest = checkpoints / "000004"
    _change(rng, checkpoints, newest)
    for read in (_restored, _inspected, check_committed):
        at = checkpoints if read is _restored else newest
        verdict = judged(lambda read=read, at=at: read(at), EvenKeelError, names=(checkpoints,))
        if verdict != "ok":
            return f"{read.__name__}: {verdict}"
    return "ok"


def _restored(checkpoints: Path) -> None:
    step, state = Checkpoints(checkpoints, keep=5).restore(Learner(checkpoints))
    assert step in (0, 2, 4), f"goes on at step {step}"
    assert all(isinstance(value, int | float) and math.isfinite(value) for value in state.values()), f"with {state}"


def _inspected(folder: Path) -> None:
    json.dumps(inspect_folder(folder))


def _change(rng: random.Random, checkpoints: Path, newest: Path) -> None:
    how = rng.random()
    if how < 0.35:
        _change_json(rng, newest / COMMIT)
    elif how < 0.45:
        _change_json(rng, newest / "loop_state.json")
    elif how < 0.75:
        _change_index(rng, newest / _INDEX)
    elif how < 0.85:
        shard = rng.choice(sorted(newest.glob("*.distcp")))
        shard.write_bytes(mutated_bytes(rng, shard.read_bytes()))
        _recommit(newest)
    else:
        _misplace(rng, checkpoints, newest)


def _change_json(rng: random.Random, path: Path) -> None:
    if not path.exists():
        return
    data = path.read_bytes()
    if rng.random() < 0.4:
        path.write_bytes(mutated_bytes(rng, data))
    else:
        text = json.dumps(mutated_data(rng, json.loads(unseal(data)))) + "\n"
        if rng.random() < 0.6:  # what another program, or another version, wrote on purpose
            write_sealed(path, text)
        else:
            path.write_text(text, encoding="utf-8")
        if path.name != COMMIT and rng.random() < 0.6:
            _recommit(path.parent)


def _change_index(rng: random.Random, path: Path) -> None:
    """The pickle of the index, as bytes or as objects, with a COMMIT that fits it: damage before it was committed."""
    data = path.read_bytes()
    if rng.random() < 0.5:
        path.write_bytes(mutated_bytes(rng, data))
    else:
        metadata = pickle.loads(data)  # noqa: S301 - our own, made a moment ago
        _change_metadata(rng, metadata)
        path.write_bytes(pickle.dumps(metadata))
    if rng.random() < 0.8:
        _recommit(path.parent)


def _change_metadata(rng: random.Random, metadata: Any) -> None:
    places = list(metadata.storage_data.values())
    tensors = [entry for entry in metadata.state_dict_metadata.values() if hasattr(entry, "chunks")]
    info, tensor = rng.choice(places), rng.choice(tensors)
    number = rng.choice((-1, 0, 1, 7, 2**31, 2**62, 2**80, 10**25, None, "x", 0.5))
    match rng.randrange(9):
        case 0:
            info.relative_path = rng.choice(("../x", "/etc/passwd", "", "a\nb", "x" * 5000, None, 3, "\0", COMMIT, "."))
        case 1:
            info.offset = number
        case 2:
            info.length = number
        case 3:
            import torch

            tensor.size = rng.choice(
                (torch.Size([]), torch.Size([2**40]), torch.Size([2**31, 2**31]), None, (1, "x"), (-1, 4))
            )
        case 4:
            chunk = rng.choice(tensor.chunks)
            chunk.offsets = rng.choice((None, (0,), (1, 2, 3), (-1, 0), (2**40, 0), "ab", ()))
        case 5:
            chunk = rng.choice(tensor.chunks)
            chunk.sizes = rng.choice((None, (0,), (2**40, 2**40), (-1, 4), "ab", (), (3,)))
        case 6:
            tensor.chunks = rng.choice(([], None, tensor.chunks * 3, [3], tensor.chunks[:0]))
        case 7:
            tensor.properties = rng.choice((None, 3, {}))
        case _:
            setattr(
                metadata,
                rng.choice(("storage_data", "state_dict_metadata")),
                rng.choice((None, {}, [], 3, {"x": None})),
            )


def _recommit(folder: Path) -> None:
    from pipeline.trainer.checkpoints import commit

    (folder / COMMIT).unlink(missing_ok=True)
    commit(folder, int(folder.name))


def _misplace(rng: random.Random, checkpoints: Path, newest: Path) -> None:
    match rng.randrange(8):
        case 0:
            stranger = checkpoints / rng.choice(_STRANGERS)
            rng.choice(
                (
                    lambda: stranger.mkdir(),
                    lambda: stranger.write_bytes(b"x"),
                    lambda: shutil.copytree(newest, stranger),
                )
            )()
        case 1:
            (newest / COMMIT).unlink()
            rng.choice(((newest / COMMIT).mkdir, lambda: (newest / COMMIT).symlink_to(COMMIT), lambda: None))()
        case 2:
            rng.choice([path for path in newest.iterdir() if path.name != COMMIT]).unlink()
        case 3:
            shutil.rmtree(newest)
            rng.choice(
                (lambda: newest.write_bytes(b"x"), lambda: newest.symlink_to(newest), lambda: os.mkfifo(newest))
            )()
        case 4:
            newest.rename(checkpoints / rng.choice(("000005", "000003", "1000000")))
            newest.mkdir()
        case 5:
            (newest / rng.choice(("extra", "a\nb"))).write_bytes(b"x")
        case 6:
            (newest / "loop_state.json").unlink()
            (newest / "loop_state.json").mkdir()
        case _:
            (newest / COMMIT).write_bytes(_sealed_or_not(rng, rng.choice(_COMMITS)))

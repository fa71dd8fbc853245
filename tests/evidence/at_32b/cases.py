"""What is measured: cases of models, each a file of results that is made once."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from pipeline.data.files import write_atomically
from tests.evidence.at_32b.maps import BF16, ENDS, KV, REFERENCE, UNIFORM, WIDE, Map
from tests.evidence.at_32b.readout import Head, read
from tests.evidence.at_32b.stack import Decoder, Streams
from tests.evidence.at_32b.weights import QWEN3_32B, Sizes, Weights, narrow

BUCKETS = 16
"""Parts of a long row whose means are kept."""


@dataclass(frozen=True)
class Case:
    """One model, read at several depths."""

    study: str
    """depth, ends, width, length or shapes"""
    kind: str
    """plain or outliers; growing or flat: `outliers-growing`."""
    sizes: Sizes
    layers: int
    readouts: tuple[int, ...]
    maps: Sequence[Map]
    seed: int
    rows: int = 1
    length: int = 64

    @property
    def name(self) -> str:
        size = f"h{self.sizes.hidden}-l{self.layers}-t{self.rows}x{self.length}"
        return f"{self.study}-{self.kind}-{size}-s{self.seed}"

    def weights(self) -> Weights:
        return Weights(self.sizes, self.seed, plain=self.kind.startswith("plain"))


SEEDS = 3
KINDS = ("plain-flat", "plain-growing", "outliers-flat", "outliers-growing")
DEPTHS = (1, 2, 4, 8, 16, 32, 64)


def all_cases() -> Iterator[Case]:
    """One seed after another, so that a study that is ended early has them all in part."""
    uniform = (REFERENCE, BF16, *UNIFORM)
    for seed in range(SEEDS):
        for kind in KINDS:
            maps = WIDE if kind.startswith("outliers") else uniform
            if kind.endswith("growing"):  # a stream that grows does not know how deep the model is
                yield Case("depth", kind, narrow(256), 64, DEPTHS, maps, seed)
            else:
                for depth in (4, 8, 16, 32, 64):
                    yield Case("depth", kind, narrow(256), depth, (depth,), maps, seed)
        for kind in KINDS:
            for hidden in (128, 512, 1024):
                yield Case("width", kind, narrow(hidden), 8, (8,), uniform, seed)
        for depth in (4, 16, 64):
            ends = (REFERENCE, UNIFORM[0], *ENDS)
            yield Case("ends", "outliers-flat", narrow(256), depth, (depth,), ends, seed)
        several = (REFERENCE, BF16, *UNIFORM[:2], *KV)
        yield Case("length", "outliers-flat", narrow(256), 8, (8,), several, seed, length=4096)


def true_shapes() -> list[Case]:
    """64 layers of Qwen3-32B's own shapes, read after each."""
    return [
        Case("shapes", kind, QWEN3_32B, 64, tuple(range(1, 65)), WIDE, 0, length=48)
        for kind in ("outliers-flat", "outliers-growing")
    ]


def run(case: Case, folder: Path) -> None:
    """Measure a case into `folder`/NAME.json; a true shape's streams are kept after each layer, to go on from."""
    path, state = folder / f"{case.name}.json", folder / "state" / f"{case.name}.safetensors"
    done: dict[str, Any] = json.loads(path.read_text()) if path.exists() else _new(case)
    if done["done"] == case.layers:
        return
    weights = case.weights()
    decoder = Decoder(weights, case.layers, case.maps, flat=case.kind.endswith("flat"))
    streams: Streams = load_file(state) if done["done"] else decoder.embed(case.rows, case.length)
    head, gains = Head(weights).matrix(), weights.gains("last", "norm")
    for index in range(done["done"], case.layers):
        local: dict[str, float] = {}
        streams = decoder.layer(index, streams, local)
        done["local"].append(local)
        done["done"] = index + 1
        if index + 1 in case.readouts:
            done["readouts"][str(index + 1)] = _summary(read(streams, head, gains), case)
        if case.study == "shapes":
            state.parent.mkdir(parents=True, exist_ok=True)
            save_file(streams, state.with_suffix(".new"))
            state.with_suffix(".new").replace(state)
            write_atomically(path, json.dumps(done))
            print(case.name, index + 1, flush=True)
    write_atomically(path, json.dumps(done))


def _new(case: Case) -> dict[str, Any]:
    return dict(
        study=case.study,
        kind=case.kind,
        hidden=case.sizes.hidden,
        layers=case.layers,
        rows=case.rows,
        length=case.length,
        seed=case.seed,
        done=0,
        local=[],
        readouts={},
    )


def _summary(found: dict[str, dict[str, Tensor]], case: Case) -> dict[str, Any]:
    """Map → quantity → mean, standard error over positions (blocks of a row, as neighbors share a context), parts."""
    return {
        name: {quantity: _moments(values.double(), case) for quantity, values in quantities.items()}
        for name, quantities in found.items()
    }


def _moments(values: Tensor, case: Case) -> dict[str, Any]:
    blocks = values.reshape(case.rows, case.length)
    blocks = blocks.reshape(case.rows * math.gcd(BUCKETS, case.length), -1).mean(dim=1)
    error = float(blocks.std() / len(blocks) ** 0.5)
    result = dict(mean=_short(float(values.mean())), error=_short(error), median=_short(float(values.median())))
    if case.study == "length":
        result["parts"] = [_short(float(part)) for part in blocks]
    return result


def _short(value: float) -> float:
    return float(f"{value:.5g}")


def measure(folder: Path, studies: Sequence[str], limit: int | None = None) -> None:
    """Run what is missing, `limit` cases of it at most."""
    torch.set_num_threads(1)
    folder.mkdir(parents=True, exist_ok=True)
    cases = [case for case in (*all_cases(), *true_shapes()) if case.study in studies]
    with torch.inference_mode():
        for case in cases[:limit]:
            print(case.name, flush=True)
            run(case, folder)

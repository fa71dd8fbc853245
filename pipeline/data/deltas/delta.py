"""What a version changed of the one before it, in the folder of the version.

    policy/000013/manifest.json      every tensor of version 13, with the SHA-256 of its bytes: the final state
                  delta-00002.bin    what changed of the tensors that learner rank 2 sends: payloads, one after another
                  delta.json         which payload belongs where (pipeline.data.deltas.places), and for which weights:
                                     the version that it was made from, and the digest of all of that one's tensors

Beside it lie weight_check.json, quant_map.yaml and SHA256SUMS, as in every policy folder. A folder of an anchor holds
the weights, too.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from pipeline.data.border.attributes import problem_of
from pipeline.data.deltas.places import Bytes, Places, apply, changed_runs
from pipeline.data.integrity.regular import read_at_most
from pipeline.data.integrity.sealed import MAX_BYTES, read_sealed_json, write_sealed_json
from pipeline.errors import StoreError
from precision.text.json_data import parse_object

DELTA_FILE, MANIFEST_FILE = "delta.json", "manifest.json"
STATE_DIGITS = 12
"""Of the digest of a state, in names of folders."""
_MOST = 1 << 53
_DIGEST = r"^[0-9a-f]{64}$"

Manifest = Mapping[str, Mapping[str, Any]]
"""Tensor → what a manifest says about it (megatron_bridge.hf.shard_writer)."""


@dataclass(frozen=True)
class Payload:
    """Where the payload of one run lies."""

    file: int
    """Learner rank that sent it: `delta-00002.bin`."""
    offset: int
    num_bytes: int
    run: Places


class _Delta(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore")

    version: int = Field(ge=0, lt=_MOST)
    base: int = Field(ge=0, lt=_MOST)
    base_state: str = Field(pattern=_DIGEST)
    widths: dict[str, int]
    """Tensor that changed → bytes of one of its numbers."""
    payloads: dict[str, list[list[int]]]
    """Tensor that changed → file, offset, bytes, and the four numbers of Places, of each of its runs."""


@dataclass(frozen=True, kw_only=True)
class Delta:
    """`delta.json` of one version."""

    version: int
    base: int
    """The version that it was made from."""
    base_state: str
    """Of that version (`state_of`)."""
    widths: Mapping[str, int]
    payloads: Mapping[str, Sequence[Payload]]

    def save(self, folder: Path) -> None:
        """Write it, durably."""
        write_sealed_json(
            folder / DELTA_FILE,
            dict(
                version=self.version,
                base=self.base,
                base_state=self.base_state,
                widths=dict(self.widths),
                payloads={name: [list_of(one) for one in runs] for name, runs in self.payloads.items()},
            ),
        )

    @staticmethod
    def load(folder: Path, remedy: str) -> Delta | None:
        """The delta of a policy folder; None where it has none. Raises StoreError when it is damaged."""
        path = folder / DELTA_FILE
        try:
            found = _Delta.model_validate(read_sealed_json(path, remedy))
            payloads = {name: [payload_of(one) for one in runs] for name, runs in found.payloads.items()}
        except FileNotFoundError:
            return None
        except ValidationError as error:
            raise StoreError(f"{path} is damaged ({problem_of(error)}); {remedy}") from None
        except (OSError, TypeError) as error:
            raise StoreError(f"{path} is damaged ({error}); {remedy}") from None
        if payloads.keys() != found.widths.keys() or not {*found.widths.values()} <= {1, 2, 4, 8}:
            raise StoreError(f"{path} is damaged (its tensors and their widths differ); {remedy}")
        return Delta(
            version=found.version,
            base=found.base,
            base_state=found.base_state,
            widths=found.widths,
            payloads=payloads,
        )

    def overwrite(self, folder: Path, name: str, target: Bytes) -> None:
        """Write what changed of tensor `name` over `target`, the bytes of the base or of this version. `folder` is that
        of the version. Raises StoreError where a payload is missing or damaged."""
        for payload in self.payloads.get(name, ()):
            path = folder / payload_name(payload.file)
            try:
                with path.open("rb") as file:
                    file.seek(payload.offset)
                    data = file.read(payload.num_bytes)
                apply(target, self.widths[name], payload.run, data)
            except (OSError, ValueError) as error:
                raise StoreError(f"{path} does not hold what changed of {name} ({error})") from error


@dataclass
class DeltaWriter:
    """What one learner rank sends of a version."""

    folder: Path
    rank: int
    widths: dict[str, int] = field(default_factory=dict)
    payloads: dict[str, list[Payload]] = field(default_factory=dict)
    num_bytes: int = 0
    num_changed: int = 0
    """Numbers that differ."""

    def add(self, name: str, old: Bytes, new: Bytes, width: int) -> bool:
        """Append what changed of a tensor; returns whether anything did."""
        runs = changed_runs(old, new, width)
        with (self.folder / payload_name(self.rank)).open("ab") as file:
            for run, data, num_changed in runs:
                self.payloads.setdefault(name, []).append(Payload(self.rank, self.num_bytes, len(data), run))
                file.write(data)
                self.num_bytes += len(data)
                self.num_changed += num_changed
        if runs:
            self.widths[name] = width
        return bool(runs)


def payload_name(rank: int) -> str:
    """The file of a learner rank."""
    return f"delta-{rank:05}.bin"


def list_of(payload: Payload) -> list[int]:
    """As `delta.json` holds it, and as ranks tell one another."""
    return [payload.file, payload.offset, payload.num_bytes, *payload.run]


def payload_of(numbers: Sequence[int]) -> Payload:
    """What `list_of` gave. Raises TypeError for another number of numbers."""
    file, offset, num_bytes = numbers[:3] if len(numbers) == 7 else (-1, -1, -1)
    if min(file, offset, num_bytes) < 0:
        raise TypeError("a payload is not described by seven numbers")
    return Payload(file, offset, num_bytes, Places(*numbers[3:]))


def read_manifest(folder: Path, remedy: str) -> dict[str, dict[str, Any]]:
    """What a policy folder says about its tensors. Raises StoreError."""
    path = folder / MANIFEST_FILE
    try:
        found = parse_object(read_at_most(path, MAX_BYTES))["tensors"]
        if isinstance(found, dict) and all(isinstance(one, dict) and one.keys() >= _DIGITS for one in found.values()):
            return found
        raise ValueError("its tensors are not described")
    except (OSError, KeyError, ValueError) as error:
        raise StoreError(f"{path} cannot be read ({error}); {remedy}") from error


_DIGITS = {"sha256", "shape", "dtype", "bytes"}


def state_of(manifest: Manifest) -> str:
    """Digest of the weights of a version: of the names, kinds and bytes of all tensors, wherever they lie."""
    lines = (json.dumps([name, *(manifest[name][key] for key in sorted(_DIGITS))]) for name in sorted(manifest))
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()

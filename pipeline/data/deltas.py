"""Publish a version's changes against an earlier version, and find the versions that it builds on.

    policy/000013/manifest.json      every tensor of version 13, with the SHA-256 of its bytes: the final state
                  delta-00002.bin    the changes in the tensors that learner rank 2 sends: payloads, one after another
                  delta.json         the place of each payload (Places), the base version, and the digest of all of the
                                     base's tensors

    payload   zstd of: gaps, then values; of each first all lowest bytes, then all second ones, and so on
    gaps      for each place, the count of numbers since the place before; of 1 or 2 bytes
    values    the new number at each place, bit for bit; without gaps they stand at every place

Values overwrite. So a payload may be applied repeatedly, and may include unchanged places, which bridge gaps too long
for their bytes. Numbers are compared as bits, so NaN and the two zeros are ordinary numbers.

    000010 weights ◀── 000011 delta ◀── 000012 delta ◀── 000013 weights and delta ◀── 000014 delta

Version 12 is made from 10, 11 and 12, and version 14 from 13 and 14. A version may be published again with other
weights, so a delta names the digest of its base, and a link is valid only if the base's folder has that digest.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numcodecs.zstd import Zstd
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from pipeline.data.checksums import MAX_BYTES, read_sealed_json, write_sealed_json
from pipeline.data.files import read_at_most
from pipeline.data.run_directory import numbered, numbered_folders
from pipeline.errors import StoreError
from precision.settings import problem_of
from precision.text import parse_object

INDEX_FILE = "model.safetensors.index.json"
DELTA_FILE, MANIFEST_FILE = "delta.json", "manifest.json"
STATE_DIGITS = 12
"""Digits of a state's digest in folder names."""
RUN_NUMBERS = 1 << 24
"""Longest run encoded at once: it bounds the memory, and the size of an unpacked payload."""
LEVEL = 1
"""The zstd level: level 9 takes ten times as long and saves 1 % (tests/bench/delta.py)."""
_UNSIGNED = {width: np.dtype(f"<u{width}") for width in (1, 2, 4, 8)}
_WORTH_ALL = 8
"""From one changed number in this many on, the encoding of all numbers is tried as well."""
_REMEDY = "stop the run and repair it: `evenkeel repair`"
_MOST = 1 << 53
_DIGEST = r"^[0-9a-f]{64}$"
_DIGITS = {"sha256", "shape", "dtype", "bytes"}
Bytes = NDArray[np.uint8]
Numbers = NDArray[np.unsignedinteger[Any]]
Manifest = Mapping[str, Mapping[str, Any]]
"""Tensor → its entry in a manifest (megatron_bridge.hf.tensor_files)."""


class Places(NamedTuple):
    """The changes of one run of numbers."""

    first: int
    """The run's start in its tensor, in numbers."""
    length: int
    places: int
    """Number of values in the payload."""
    gap_bytes: int
    """Bytes per gap: 1 or 2; 0 where every place has a value."""


def changed_runs(old: Bytes, new: Bytes, width: int) -> list[tuple[Places, bytes, int]]:
    """Return each changed run from `old` to `new` [n * width]: its place, payload, and count of differing numbers."""
    before, after = old.view(_UNSIGNED[width]), new.view(_UNSIGNED[width])
    found, pack = [], Zstd(level=LEVEL)
    for first in range(0, len(after), RUN_NUMBERS):
        old_part, part = (numbers[first : first + RUN_NUMBERS] for numbers in (before, after))
        changed = np.flatnonzero(old_part != part)
        if not len(changed):
            continue
        gaps = np.diff(changed, prepend=-1) - 1
        # A place more costs about as much as the second bytes of four gaps, which are mostly 0.
        gap_bytes = 1 if 4 * int((gaps >> 8).sum()) <= len(gaps) else 2
        longest = (1 << 8 * gap_bytes) - 1
        bridges = gaps // (longest + 1)  # places to insert, so that no gap exceeds `longest`
        if bridges.any():
            ends = np.cumsum(bridges + 1) - 1
            bridged = np.full(ends[-1] + 1, longest, np.int64)
            bridged[ends] = gaps - bridges * (longest + 1)
            gaps = bridged
        planes = [_planes(gaps.astype(_UNSIGNED[gap_bytes])), _planes(part[np.cumsum(gaps + 1) - 1])]
        place, data = Places(first, len(part), len(gaps), gap_bytes), bytes(pack.encode(np.concatenate(planes)))
        if len(gaps) * _WORTH_ALL > len(part):
            everything = bytes(pack.encode(_planes(part)))
            if len(everything) < len(data):
                place, data = Places(first, len(part), len(part), 0), everything
        found.append((place, data, len(changed)))
    return found


def apply(target: Bytes, width: int, run: Places, payload: bytes) -> None:
    """Overwrite a run in `target`, [n * width] writable bytes. Raises ValueError for a bad payload, without writing."""
    numbers = target.view(_UNSIGNED[width])[run.first : run.first + run.length]
    if run.gap_bytes not in (0, 1, 2) or len(numbers) != run.length or not 0 <= run.places <= run.length:
        raise ValueError(f"{run} does not fit a tensor of {len(target) // width} numbers")
    planes = np.empty(run.places * (run.gap_bytes + width), np.uint8)  # the payload's claims allocate nothing
    try:
        Zstd().decode(payload, out=planes)
    except (RuntimeError, ValueError) as error:
        raise ValueError(f"its payload cannot be unpacked to {len(planes)} bytes ({error})") from error
    values = _joined(planes[run.places * run.gap_bytes :], width)
    if run.gap_bytes == 0:
        if run.places != run.length:
            raise ValueError(f"{run.places} values for {run.length} places")
        numbers[:] = values
        return
    gaps = _joined(planes[: run.places * run.gap_bytes], run.gap_bytes)
    places = np.cumsum(gaps.astype(np.int64) + 1) - 1
    if run.places and places[-1] >= run.length:
        raise ValueError(f"its last place is {places[-1]}, expected one below {run.length}")
    numbers[places] = values


def _planes(numbers: Numbers) -> Bytes:
    """Return [n] numbers of w bytes as w runs of n bytes: bytes of one kind compress better together."""
    return np.ascontiguousarray(numbers).view(np.uint8).reshape(len(numbers), -1).T.reshape(-1)


def _joined(planes: Bytes, width: int) -> Numbers:
    """Invert `_planes`."""
    return np.ascontiguousarray(planes.reshape(width, -1).T).reshape(-1).view(_UNSIGNED[width])


def payload_name(rank: int) -> str:
    """Return the name of the file that learner rank `rank` writes its payloads to."""
    return f"delta-{rank:05}.bin"


class Payload(NamedTuple):
    """The place of a payload and its run, as seven numbers: in `delta.json`, and between ranks."""

    file: int
    """The learner rank that sent it: `delta-00002.bin`."""
    offset: int
    num_bytes: int
    first: int
    """These four as in Places."""
    length: int
    places: int
    gap_bytes: int


class _Delta(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore")

    version: int = Field(ge=0, lt=_MOST)
    base: int = Field(ge=0, lt=_MOST)
    base_state: str = Field(pattern=_DIGEST)
    widths: dict[str, int]
    """Changed tensor → bytes of one of its numbers."""
    payloads: dict[str, list[list[int]]]
    """Changed tensor → file, offset, bytes, and the four numbers of Places, of each of its runs."""


@dataclass(frozen=True, kw_only=True)
class Delta:
    """The content of a version's `delta.json`."""

    version: int
    base: int
    """The version that the delta applies to."""
    base_state: str
    """The base's digest (`state_of`)."""
    widths: Mapping[str, int]
    payloads: Mapping[str, Sequence[Payload]]

    def save(self, folder: Path) -> None:
        write_sealed_json(
            folder / DELTA_FILE,
            dict(
                version=self.version,
                base=self.base,
                base_state=self.base_state,
                widths=dict(self.widths),
                payloads={name: [[*one] for one in runs] for name, runs in self.payloads.items()},
            ),
        )

    @staticmethod
    def load(folder: Path, remedy: str) -> Delta | None:
        """Read the delta of a policy folder; None without one. Raises StoreError for damage."""
        path = folder / DELTA_FILE
        try:
            found = _Delta.model_validate(read_sealed_json(path, remedy))
            payloads = {name: [Payload(*one) for one in runs] for name, runs in found.payloads.items()}
        except FileNotFoundError:
            return None
        except ValidationError as error:
            raise StoreError(f"{path} is damaged ({problem_of(error)}); {remedy}") from None
        except (OSError, TypeError) as error:
            raise StoreError(f"{path} is damaged ({error}); {remedy}") from None
        if any(min(one[:3]) < 0 for runs in payloads.values() for one in runs):
            raise StoreError(f"{path} is damaged (a payload lies nowhere); {remedy}")
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
        """Write the changes of tensor `name` over `target`, bytes of the base or this version. Raises StoreError."""
        for payload in self.payloads.get(name, ()):
            path = folder / payload_name(payload.file)
            try:
                with path.open("rb") as file:
                    file.seek(payload.offset)
                    data = file.read(payload.num_bytes)
                apply(target, self.widths[name], Places(*payload[3:]), data)
            except (OSError, ValueError) as error:
                raise StoreError(f"{path} does not hold the changes of {name} ({error})") from error


@dataclass
class DeltaWriter:
    """The delta of one learner rank."""

    folder: Path
    rank: int
    widths: dict[str, int] = field(default_factory=dict)
    payloads: dict[str, list[Payload]] = field(default_factory=dict)
    num_bytes: int = 0
    num_changed: int = 0

    def add(self, name: str, old: Bytes, new: Bytes, width: int) -> bool:
        """Append the changes of a tensor, and return whether there are any."""
        runs = changed_runs(old, new, width)
        with (self.folder / payload_name(self.rank)).open("ab") as file:
            for run, data, num_changed in runs:
                self.payloads.setdefault(name, []).append(Payload(self.rank, self.num_bytes, len(data), *run))
                file.write(data)
                self.num_bytes += len(data)
                self.num_changed += num_changed
        if runs:
            self.widths[name] = width
        return bool(runs)


def read_manifest(folder: Path, remedy: str) -> dict[str, dict[str, Any]]:
    """Read a policy folder's description of its tensors. Raises StoreError."""
    path = folder / MANIFEST_FILE
    try:
        found = parse_object(read_at_most(path, MAX_BYTES))["tensors"]
        if isinstance(found, dict) and all(isinstance(one, dict) and one.keys() >= _DIGITS for one in found.values()):
            return found
        raise ValueError("its tensors are not described")
    except (OSError, KeyError, ValueError) as error:
        raise StoreError(f"{path} cannot be read ({error}); {remedy}") from error


def state_of(manifest: Manifest) -> str:
    """Return the digest of a version: of the names, kinds and bytes of all its tensors, wherever they lie."""
    lines = (json.dumps([name, *(manifest[name][key] for key in sorted(_DIGITS))]) for name in sorted(manifest))
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


@dataclass(frozen=True)
class Link:
    """A version in its folder."""

    version: int
    folder: Path
    manifest: Manifest
    delta: Delta | None
    """The delta to an earlier version, if the folder has one."""

    @cached_property
    def state(self) -> str:
        return state_of(self.manifest)


def is_whole(folder: Path) -> bool:
    """Return whether a policy folder holds all weights, not only a delta."""
    return (folder / INDEX_FILE).exists() or not (folder / DELTA_FILE).exists()


def read_link(policies: Path, version: int) -> Link:
    """Read the folder of a version. Raises StoreError when it is missing, damaged, or another version's."""
    folder = policies / numbered(version)
    link = Link(version, folder, read_manifest(folder, _REMEDY), Delta.load(folder, _REMEDY))
    if link.delta is not None and (link.delta.version != version or link.delta.base >= version):
        raise StoreError(f"{folder} holds the delta from version {link.delta.base} to {link.delta.version}; {_REMEDY}")
    return link


def chain_to(policies: Path, version: int, held: Collection[str] = ()) -> list[Link]:
    """Return the links to a version from a state in `held`, or else the newest whole one. Raises StoreError."""
    links, whole = list[Link](), 0
    try:
        link = read_link(policies, version)
        while True:
            links.insert(0, link)
            if link.state in held:
                return links
            if is_whole(link.folder) and not whole:
                whole = len(links)
            if (whole and not held) or (delta := link.delta) is None:
                break
            link = read_link(policies, delta.base)
            if link.state != delta.base_state:
                raise StoreError(
                    f"{link.folder} holds other weights than those that the delta of version {delta.version} was made "
                    f"from; {_REMEDY}"
                )
    except StoreError:
        if not whole:
            raise
    return links[-whole:]


def needed(policies: Path, versions: Iterable[int]) -> set[int]:
    """Return `versions` and all behind them; beyond an unreadable link, all from the newest whole version on."""
    found: set[int] = set()
    for version in versions:
        found.add(version)
        if is_whole(policies / numbered(version)):
            continue
        try:
            found |= {link.version for link in chain_to(policies, version)}
        except StoreError:  # if it is damaged, `evenkeel repair` finds it
            before = [one for one in numbered_folders(policies) if one < version]
            whole = max((one for one in before if is_whole(policies / numbered(one))), default=0)
            found |= {one for one in before if one >= whole}
    return found

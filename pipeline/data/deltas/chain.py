"""Which policy folders a version needs: those of the deltas that lead to it, back to the newest that holds weights.

    000010 weights ◀── 000011 delta ◀── 000012 delta ◀── 000013 weights and delta ◀── 000014 delta

Who holds nothing makes version 12 from 10, 11 and 12, and version 14 from 13 and 14. Who holds version 12 goes on by
the deltas of 13 and 14. A version may have been published again with other weights, so a delta also names the state
that it was made from, and a link fits only where that is the state of the folder.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from pipeline.data.deltas.delta import DELTA_FILE, Delta, Manifest, read_manifest, state_of
from pipeline.data.run_directory import numbered, numbered_folders
from pipeline.errors import StoreError

INDEX_FILE = "model.safetensors.index.json"
_REMEDY = "stop the run and repair it: `evenkeel repair`"


@dataclass(frozen=True)
class Link:
    """One version in its folder."""

    version: int
    folder: Path
    manifest: Manifest
    delta: Delta | None
    """From the version before; None where the folder has none."""

    @cached_property
    def state(self) -> str:
        """Digest of the version's weights."""
        return state_of(self.manifest)

    @property
    def is_whole(self) -> bool:
        """Whether the folder holds the weights, and not only what changed."""
        return is_whole(self.folder)


def is_whole(folder: Path) -> bool:
    """Whether a policy folder holds the weights, and not only what changed."""
    return (folder / INDEX_FILE).exists() or not (folder / DELTA_FILE).exists()


def read_link(policies: Path, version: int) -> Link:
    """What the folder of a version says. Raises StoreError when it is missing, damaged, or that of another version."""
    folder = policies / numbered(version)
    link = Link(version, folder, read_manifest(folder, _REMEDY), Delta.load(folder, _REMEDY))
    if link.delta is not None and (link.delta.version != version or link.delta.base >= version):
        raise StoreError(f"{folder} holds the delta from version {link.delta.base} to {link.delta.version}; {_REMEDY}")
    return link


def links_back(policies: Path, version: int) -> Iterator[Link]:
    """The version, the one that its delta was made from, and so on; the last one has no delta. Raises StoreError where
    a link is missing or does not fit."""
    link = read_link(policies, version)
    yield link
    while (delta := link.delta) is not None:
        link = read_link(policies, delta.base)
        if link.state != delta.base_state:
            raise StoreError(
                f"{link.folder} holds other weights than those that the delta of version {delta.version} was made "
                f"from; {_REMEDY}"
            )
        yield link


def chain_to(policies: Path, version: int, held: Collection[str] = ()) -> list[Link]:
    """The links to a version, which is the last: the first one's state is among those that are `held`, or else it is
    the newest that is whole. Raises StoreError where the version cannot be made."""
    links, whole = list[Link](), 0
    try:
        for link in links_back(policies, version):
            links.insert(0, link)
            if link.state in held:
                return links
            if link.is_whole and not whole:
                whole = len(links)
            if whole and not held:
                break  # the last link is whole: it has no delta
    except StoreError:
        if not whole:
            raise
    return links[-whole:]


def needed(policies: Path, versions: Iterable[int]) -> set[int]:
    """The versions from which those `versions` are made, and they themselves. Where a link cannot be read, maybe for a
    moment alone, one may need all from the newest whole one on."""
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

"""What cannot be changed in a cluster: another rendering, applied over the objects of a run, would be refused."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

Object = dict[str, Any]

IMMUTABLE: dict[str, tuple[tuple[str, ...], ...]] = {
    "JobSet": (
        *(("spec", "replicatedJobs"), ("spec", "network"), ("spec", "startupPolicy")),
        *(("spec", "successPolicy"), ("spec", "failurePolicy"), ("spec", "managedBy")),
    ),
    "LeaderWorkerSet": (("spec", "leaderWorkerTemplate", "size"), ("spec", "networkConfig")),
    "ConfigMap": (("data",), ("immutable",)),
    "Job": (("spec",),),
    "PersistentVolumeClaim": (("spec", "accessModes"), ("spec", "storageClassName")),
}


def check_changes(before: Sequence[Object], after: Sequence[Object]) -> Iterator[str]:
    """Immutable fields in which objects of one name differ."""
    known = {(one["kind"], one["metadata"]["name"]): one for one in before}
    for one in after:
        old = known.get((one["kind"], one["metadata"]["name"]))
        for path in IMMUTABLE.get(one["kind"], ()) if old else ():
            if place := _difference(_at(old, path), _at(one, path), ".".join(path)):
                named = f"{one['kind']} {one['metadata']['name']}"
                yield f"{named}: {place} cannot be changed; delete the object first, then apply"


def _at(one: Any, path: tuple[str, ...]) -> Any:
    for part in path:
        one = one.get(part) if isinstance(one, dict) else None
    return one


def _difference(before: Any, after: Any, where: str) -> str | None:
    """Where the first difference is."""
    if isinstance(before, dict) and isinstance(after, dict):
        for key in [*before, *(key for key in after if key not in before)]:
            if found := _difference(before.get(key), after.get(key), f"{where}.{key}"):
                return found
        return None
    if isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        for place, (old, new) in enumerate(zip(before, after, strict=True)):
            if found := _difference(old, new, f"{where}[{place}]"):
                return found
        return None
    return None if before == after else where

"""What a run reads that lies outside of its directory, and may be another thing at its next start: the weights that it
begins with, and the code of its rewards.

    RUN/outside.json   what there was, from which step on; the newest last

Data and chat template are frozen with the recipe, and another reference is refused. Weights are read again by a start
without a checkpoint, and by a reference to them; a reward may be mended on purpose. So a change is no error. It is told
once, noted, and marks where the numbers of a curve begin to be of another reward.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterator
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from pipeline.config.recipe import Recipe
from pipeline.config.task_sections import DataTask
from pipeline.data.checksums import fingerprints, read_sealed_json, write_sealed_json
from pipeline.data.event_log import EventLog
from pipeline.data.run_directory import RunDirectory
from precision.text import listed

_REMEDY = "remove it: what there is now is then taken for what the run began with"


def note_outside(run: RunDirectory, recipe: Recipe, event_log: EventLog) -> list[str]:
    """Record what the run reads outside of its directory; a sentence for each kind of which something has changed since
    the last start, which is noted as an event, too. Raises StoreError when the record is damaged."""
    path = run.outside_file
    notes = read_sealed_json(path, _REMEDY)["notes"] if path.exists() else []
    known = notes[-1] if notes else {}
    found = dict(weights=_weights(recipe.model.path, known.get("weights", {})), reward=_reward(recipe))
    changed = {
        kind: sorted(name for name in now.keys() | before.keys() if _differs(now.get(name), before.get(name)))
        for kind, now in found.items()
        if (before := known.get(kind)) is not None and _names(before, kind) == _names(now, kind)
    }
    changed = {kind: names for kind, names in changed.items() if names}
    if {**known, **found} == known:
        return []
    step = run.num_learned() if notes else 0
    run.fence()
    for kind, names in changed.items():
        event_log.event("files_changed", what=kind, step=step, files=names)
    write_sealed_json(path, dict(notes=[*notes, dict(step=step, **found)]))
    return [_SAID[kind].format(files=listed(names, most=3), step=step) for kind, names in changed.items()]


_SAID = {
    "weights": "the weights that the run began with were changed since its last start ({files}): what a start without "
    "a checkpoint trains from step {step} on begins with others",
    "reward": "the code of the reward was changed since the last start ({files}): rewards and held-out scores from "
    "step {step} on are no continuation of those before",
}


def _names(found: dict[str, Any], kind: str) -> object:
    """With another recipe other files are meant: that is told as a change of the recipe."""
    return sorted(name.partition("/")[0] for name in found) if kind == "reward" else None


def _differs(one: list[Any] | None, other: list[Any] | None) -> bool:
    return bool((one or [None])[-1] != (other or [None])[-1])


def reward_code(run: RunDirectory) -> str:
    """A digest of the code of the run's rewards; empty where they are our own, or not known."""
    if not run.outside_file.exists():
        return ""
    files = read_sealed_json(run.outside_file, _REMEDY)["notes"][-1]["reward"]
    return hashlib.sha256(repr(sorted(files.items())).encode()).hexdigest()[:12] if files else ""


def _weights(folder: Path, known: dict[str, Any]) -> dict[str, list[Any]]:
    """File → bytes, time of its last change and SHA-256; one of which the first two are as they were `known` is not
    read again."""
    found = dict[str, list[Any]]()
    for file in sorted(folder.glob("*.safetensors")):
        stat = file.stat()
        before = known.get(file.name, [])
        if before[:2] == [stat.st_size, stat.st_mtime_ns]:
            found[file.name] = before
        elif (one := fingerprints([file])[0]) is not None:
            found[file.name] = [stat.st_size, stat.st_mtime_ns, one.sha256]
    return found


def _reward(recipe: Recipe) -> dict[str, list[str]]:
    """`package.module:function/file` → SHA-256 of each file of the code of a reward and of a filter of groups that are
    not our own; of a package all of its files."""
    task = recipe.task
    rewards = [task.reward, *(source.reward for source in task.sources)] if isinstance(task, DataTask) else []
    found = dict[str, list[str]]()
    own = {one for one in (*rewards, recipe.prompts.group_filter) if one and not one.startswith("pipeline.")}
    for name in sorted(own):
        for file in _files(name.partition(":")[0]):
            found[f"{name}/{file.name}"] = [hashlib.sha256(file.read_bytes()).hexdigest()]
    return found


def _files(module: str) -> Iterator[Path]:
    """Those of a module, found without importing anything."""
    places, spec, above = list[str](sys.path), None, ""
    for part in module.split("."):
        spec = PathFinder.find_spec(f"{above}{part}", places)
        if spec is None:
            return
        places, above = list(spec.submodule_search_locations or ()), f"{above}{part}."
    if spec is not None and places:
        yield from sorted(file for place in places for file in Path(place).rglob("*.py"))
    elif spec is not None and spec.origin is not None and Path(spec.origin).is_file():
        yield Path(spec.origin)

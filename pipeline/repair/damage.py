"""Which files of a run are damaged or missing: the one list of what is checked, for `evenkeel repair`, `verify history`
and `fork`.

Every kind of file is read by those who read it in a run, and is bound to the run, to the number that it is named by and
to what it was made from: it may be whole and lie in another's place. Names that are not ours are passed over. Left out
are logs/, exports/, pages and figures, for people; damaged/, which a repair has set aside; and links in
engines/starting/, to policies that are checked themselves.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

from pipeline.control.files import ControlFiles
from pipeline.data.checksums import read_sealed, read_sealed_json, verify_folder
from pipeline.data.deltas import chain_to, is_whole
from pipeline.data.epochs import ROLES, newest
from pipeline.data.event_log import read_lines
from pipeline.data.files import machine_failure
from pipeline.data.mismatch_files import check_mismatch
from pipeline.data.quant_maps import NumberedMaps, digest_of, older_folder, read_quant_map
from pipeline.data.run_directory import RunDirectory, announced, numbered, numbered_files, numbered_folders
from pipeline.data.run_recipes import all_recipes, recipe_of_step
from pipeline.data.store import LOST_SUFFIX, BatchStore, LostBatch
from pipeline.errors import EvenKeelError, StoreError
from pipeline.ports.weights import verify_policy
from pipeline.trainer.checkpoints import verify

Kind = Literal[
    "batch",
    "lost",
    "checkpoint",
    "policy",
    "published",
    "control",
    "evaluation",
    "logprobs",
    "old_logprobs",
    "mismatch",
    "model",
    "finished",
    "foreign",
    "record",
    "log",
    "other",
]
_BEGUN_WITH = ("SANDBOX", "reference.json", "outside.json", "parent.json", "replay.json")
_UNKNOWN = (None, None)

_FOLDERS = (
    *(
        "batches",
        "checkpoints",
        "policy",
        "policy/PUBLISHED",
        "logprobs",
        "mismatch",
        "evaluations",
        "control",
        "quant_maps",
        "recipes",
        "epochs",
        "engines",
    ),
    *("finished", "model", "skipped", "events", "metrics", "spans", "damaged", "repairs"),
)


@dataclass(frozen=True, kw_only=True)
class Damage:
    """One file or folder that fails its checks, or is missing."""

    kind: Kind
    path: Path
    problem: str
    number: int = -1
    """The batch, step or version that the file is named by; -1 where it has none."""

    @property
    def is_missing(self) -> bool:
        return not os.path.lexists(self.path)


def find_damage(run: RunDirectory) -> list[Damage]:
    """Read everything. Raises StoreError or RecipeError for what no run can be read without: FORMAT, recipe.yaml, and
    folders that are folders. Raises OSError when the machine fails to read something: that is no damage, and a whole
    file must not be set aside for it."""
    run.recipe()
    for folder in _FOLDERS:
        path = run.path / folder
        if os.path.lexists(path) and not path.is_dir():
            raise StoreError(f"{path} is no folder; move it elsewhere, then give the same command again")
    sizes = dict[int, tuple[int, int]]()
    return [
        *_batches(run, sizes),
        *_checkpoints(run),
        *_policies(run),
        *_control(run),
        *_learned(run, sizes),
        *_others(run),
        *_sealed(run),
    ]


def own_recipes(run: RunDirectory) -> set[str]:
    """Digests of the files of all recipes by which batches of the run were sampled: its own, and those of the runs that
    it was forked from. Raises as `all_recipes` does."""
    found = {one.sha256 for one in all_recipes(run.path)}
    with suppress(FileNotFoundError):
        found |= {*read_sealed_json(run.parent_file, "put back a copy, or fork the parent again")["recipes"]}
    return found


def _batches(run: RunDirectory, sizes: dict[int, tuple[int, int]]) -> Iterator[Damage]:
    """Notes the samples and the response tokens of each batch that is whole."""
    recipes = own_recipes(run)

    def read(index: int) -> None:
        batch = store.read(index, None)
        if batch.recipe_sha256 not in recipes:
            raise StoreError("it is a batch of another run: that of no recipe of this one")
        sizes[index] = batch.num_samples, batch.num_response_tokens

    store, steps = BatchStore(run.batches), run.recipe().run.steps
    learned = max((step for step in run.saved_steps() + announced(run.published) if step <= steps), default=0)
    for index in sorted({*store.holes(steps), *(set(range(learned)) - {*store.settled()})}):
        yield Damage(kind="batch", path=store.path(index), problem="missing", number=index)
    for index in store.committed():
        if index >= steps:
            yield _foreign(store.path(index), f"a batch of another run: this one has {steps} steps")
        elif not store.lost_path(index).exists():
            yield from _judged("batch", store.path(index), index, partial(read, index))
    for index, path in numbered_files(run.batches, LOST_SUFFIX).items():
        if index >= steps:
            yield _foreign(path, f"a batch of another run: this one has {steps} steps")
        else:
            yield from _judged("lost", path, index, partial(LostBatch.read, path))


def _checkpoints(run: RunDirectory) -> Iterator[Damage]:
    for step in run.saved_steps():
        folder = run.checkpoints / numbered(step)
        yield from _judged("checkpoint", folder, step, partial(verify, folder, step))


def _policies(run: RunDirectory) -> Iterator[Damage]:
    steps = run.recipe().run.steps
    versions = numbered_folders(run.policies) if run.policies.is_dir() else []
    damaged = set[int]()
    for version in versions:
        folder = run.policy_directory(version)
        for damage in _judged("policy", folder, version, partial(_check_policy, folder, version)):
            damaged.add(version)
            yield damage
    for version in versions:
        folder = run.policy_directory(version)
        if version not in damaged and not is_whole(folder):
            yield from _judged("policy", folder, version, partial(_check_chain, run, version, damaged))
    for version in announced(run.published):
        path = run.published / numbered(version)
        if version > steps:
            yield _foreign(path, f"a version of another run: this one has {steps} steps")
            continue
        yield from _judged("published", path, version, partial(_check_announced, path, version))
    if versions and not run.is_published():
        yield Damage(kind="published", path=run.published, problem="it names no version")


def _check_policy(folder: Path, version: int) -> None:
    """Raises StoreError; also for what is in it for engines with an older quant map."""
    verify_policy(folder, version, "")
    for older in sorted((folder / "maps").glob("[!.]*")):
        verify_policy(older, version, "")
        if older_folder(folder, digest_of(read_quant_map(older))) != older:
            raise StoreError(f"{older} holds weights for another quant map")


def _check_announced(path: Path, version: int) -> None:
    if (said := read_sealed(path, "").strip()) != str(version):
        raise StoreError(f"it announces version {said[:100]}")


def _check_evaluation(path: Path, version: int) -> None:
    if (found := read_sealed_json(path, "")["version"]) != version:
        raise StoreError(f"it is that of version {str(found)[:100]}")


def _check_chain(run: RunDirectory, version: int, damaged: Collection[int]) -> None:
    """Raises StoreError for a delta that leads from no whole version, or over a damaged one."""
    for link in chain_to(run.policies, version):
        if link.version in damaged:
            raise StoreError(f"version {link.version}, which it is made from, is damaged")


def _control(run: RunDirectory) -> Iterator[Damage]:
    files, maps = ControlFiles(run.control, run.fence), NumberedMaps(run.quant_maps, run.fence)
    for step, path in numbered_files(run.control, ".json").items():
        yield from _judged("control", path, step, partial(files.read, step))
    recipes = all_recipes(run.path)
    for step in run.saved_steps()[-1:]:
        path = run.control / f"{numbered(step - 1)}.json"
        if recipe_of_step(recipes, step).controller is not None and not path.exists():
            yield Damage(kind="control", path=path, problem="missing", number=step - 1)
    for number, path in numbered_files(run.quant_maps, ".yaml").items():
        yield from _judged("other", path, -1, partial(maps.read, number))


def _learned(run: RunDirectory, sizes: dict[int, tuple[int, int]]) -> Iterator[Damage]:
    """What the learner and the collector leave behind of steps and versions."""
    for step, path in numbered_files(run.logprobs, ".npy").items():
        yield from _judged("logprobs", path, step, partial(run.learner_logprobs, step, sizes.get(step, _UNKNOWN)[1]))
    for step, path in numbered_files(run.logprobs, "-old.npy").items():
        yield from _judged("old_logprobs", path, step, partial(run.old_logprobs, step, sizes.get(step, _UNKNOWN)[1]))
    yield from _missing_of_stage(run)
    for step, path in numbered_files(run.mismatch, ".zarr.zip").items():
        yield from _judged("mismatch", path, step, partial(check_mismatch, run, step, sizes.get(step, _UNKNOWN)[0]))
    for version, path in numbered_files(run.evaluations, ".json").items():
        yield from _judged("evaluation", path, version, partial(_check_evaluation, path, version))


def _missing_of_stage(run: RunDirectory) -> Iterator[Damage]:
    """Log-probabilities from the beginning of the stage in which the newest checkpoint was saved."""
    schedule, step = run.recipe().build_schedule(), max(run.saved_steps(), default=0)
    first = schedule.required_version(step)
    if schedule.kind != "staged" or run.all_skipped(range(first, step)) or not any(run.logprobs.glob("*-old.npy")):
        return
    lost = {batch.index for batch in BatchStore(run.batches).all_lost()}
    for index in set(range(step, min(first + schedule.updates_per_stage, schedule.steps))) - lost:
        if not (path := run.old_logprobs_path(index)).exists():
            yield Damage(kind="old_logprobs", path=path, problem="missing", number=index)


def _others(run: RunDirectory) -> Iterator[Damage]:
    if run.model.is_dir():
        yield from _judged("model", run.model, -1, partial(verify_folder, run.model, ""))
    for path in (run.path / "finished" / role for role in ("collector", "learner")):
        if os.path.lexists(path):
            yield from _judged("finished", path, -1, partial(read_sealed, path, ""))
    for folder in filter(_is_of_role, sorted((run.path / "epochs").glob("*"))):
        path = folder / "NEWEST" if folder.is_dir() else folder
        yield from _judged("other", path, -1, partial(newest, folder))
    engines = run.path / "engines"
    for path in (*numbered_files(engines, ".json").values(), engines / "router.json", run.path / "learner.json"):
        if os.path.lexists(path):
            yield from _judged("other", path, -1, partial(read_sealed_json, path, ""))


def _sealed(run: RunDirectory) -> Iterator[Damage]:
    """Small files that nobody above has read, and the logs."""
    for name in _BEGUN_WITH:
        if os.path.lexists(path := run.path / name):
            yield from _judged("other", path, -1, partial(read_sealed, path, ""))
    updates = [*numbered_files(run.updates, ".json").values(), *numbered_files(run.updates, ".released").values()]
    for folder in filter(_is_of_role, sorted((run.path / "epochs").glob("*/"))):
        updates += numbered_files(folder, "").values()
    for path in (*updates, *numbered_files(run.path / "repairs", ".json").values()):
        yield from _judged("record", path, -1, partial(_read_replaced, path))
    for name in ("metrics", "events", "spans"):
        for path in sorted((run.path / name).glob("*.jsonl")):
            yield from _judged("log", path, -1, partial(_check_log, path))


def _check_log(path: Path) -> None:
    damage = list[str]()
    for _ in read_lines(path, damage):
        pass
    if damage:
        raise StoreError("; ".join(damage))


def _read_replaced(path: Path) -> None:
    with suppress(FileNotFoundError):  # deleted since it was listed, as old updates are
        read_sealed(path, "", is_replaced=True)


def _is_of_role(folder: Path) -> bool:
    return folder.name.partition("-")[0] in ROLES


def _foreign(path: Path, problem: str) -> Damage:
    return Damage(kind="foreign", path=path, problem=problem)


def _judged(kind: Kind, path: Path, number: int, read: Callable[[], object]) -> Iterator[Damage]:
    try:
        read()
    except MemoryError:
        raise
    except (EvenKeelError, OSError, ValueError, LookupError, RecursionError) as error:  # others are faults of software
        if (failure := machine_failure(error)) is not None:
            raise failure from None
        if not os.path.lexists(path):
            return  # deleted since it was listed, as old policies are while a run is at work
        said = " ".join(str(error).split()).rstrip("; ") or type(error).__name__
        yield Damage(kind=kind, path=path, problem=said.removeprefix(f"{path} ").split("; ")[0], number=number)

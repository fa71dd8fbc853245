"""Which files of a run are damaged or missing. Every kind of file is read by those who read it in a run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pipeline.control.files import ControlFiles
from pipeline.data.epochs import newest
from pipeline.data.integrity.folders import verify_folder
from pipeline.data.integrity.sealed import read_sealed, read_sealed_json
from pipeline.data.ledger.lost_batches import LostBatch
from pipeline.data.ledger.published import announced
from pipeline.data.quant_maps import NumberedMaps
from pipeline.data.run_directory import RunDirectory, numbered, numbered_folders
from pipeline.data.store import BatchStore
from pipeline.data.zarr_zip import open_zarr_zip
from pipeline.errors import EvenKeelError
from pipeline.ports.weight_check import WeightCheck
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
    "other",
]


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
        return not self.path.exists()


def find_damage(run: RunDirectory) -> list[Damage]:
    """Read everything. Raises StoreError or RecipeError for what no run can be read without: FORMAT and recipe.yaml."""
    run.recipe()
    return [damage for walk in _WALKS for damage in walk(run)]


def _batches(run: RunDirectory) -> Iterator[Damage]:
    store = BatchStore(run.batches)
    learned = max(run.saved_steps() + announced(run.published), default=0)
    for index in sorted({*store.holes(), *(set(range(learned)) - {*store.settled()})}):
        yield Damage(kind="batch", path=store.path(index), problem="missing", number=index)
    for index in store.committed():
        if not store.lost_path(index).exists():
            yield from _judged("batch", store.path(index), index, lambda i=index: store.read(i, None))  # type: ignore[misc]
    for path in sorted(run.batches.glob("*.lost.json")):
        index = int(path.name.split(".")[0])
        yield from _judged("lost", path, index, lambda p=path: LostBatch.read(p))  # type: ignore[misc]


def _checkpoints(run: RunDirectory) -> Iterator[Damage]:
    for step in run.saved_steps():
        folder = run.checkpoints / numbered(step)
        yield from _judged("checkpoint", folder, step, lambda f=folder, s=step: verify(f, s))  # type: ignore[misc]


def _policies(run: RunDirectory) -> Iterator[Damage]:
    def read(folder: Path) -> None:
        verify_folder(folder, "")
        WeightCheck.load(folder)

    versions = numbered_folders(run.policies) if run.policies.is_dir() else []
    for version in versions:
        folder = run.policy_directory(version)
        yield from _judged("policy", folder, version, lambda f=folder: read(f))  # type: ignore[misc]
    for version in announced(run.published):
        path = run.published / numbered(version)
        yield from _judged("published", path, version, lambda p=path: read_sealed(p, ""))  # type: ignore[misc]
    if versions and not run.is_published():
        yield Damage(kind="published", path=run.published, problem="it names no version")


def _control(run: RunDirectory) -> Iterator[Damage]:
    files, maps = ControlFiles(run.control, run.fence), NumberedMaps(run.quant_maps, run.fence)
    for path in sorted(run.control.glob("*.json")):
        step = int(path.stem)
        yield from _judged("control", path, step, lambda s=step: files.read(s))  # type: ignore[misc]
    for step in run.saved_steps()[-1:] if run.recipe().controller is not None else []:
        if not (path := run.control / f"{numbered(step - 1)}.json").exists():
            yield Damage(kind="control", path=path, problem="missing", number=step - 1)
    for path in sorted(run.quant_maps.glob("*.yaml")):
        yield from _judged("other", path, -1, lambda p=path: maps.read(int(p.stem)))  # type: ignore[misc]


def _learned(run: RunDirectory) -> Iterator[Damage]:
    """What the learner and the collector leave behind of steps and versions."""
    for path in sorted(run.logprobs.glob("*.npy")):
        step = int(path.stem.removesuffix("-old"))
        if path.stem.endswith("-old"):
            yield from _judged("old_logprobs", path, step, lambda s=step: run.old_logprobs(s))  # type: ignore[misc]
        else:
            yield from _judged("logprobs", path, step, lambda s=step: run.learner_logprobs(s))  # type: ignore[misc]
    yield from _missing_of_stage(run)
    for path in sorted(run.mismatch.glob("*.zarr.zip")):
        step = int(path.name.split(".")[0])
        yield from _judged("mismatch", path, step, lambda p=path: open_zarr_zip(p))  # type: ignore[misc]
    for path in sorted(run.evaluations.glob("*.json")):
        yield from _judged("evaluation", path, int(path.stem), lambda p=path: read_sealed_json(p, ""))  # type: ignore[misc]


def _missing_of_stage(run: RunDirectory) -> Iterator[Damage]:
    """Log-probabilities from the beginning of the stage in which the newest checkpoint was saved."""
    schedule, step = run.recipe().build_schedule(), max(run.saved_steps(), default=0)
    first = schedule.required_version(step)
    if schedule.kind != "staged" or first == step or not any(run.logprobs.glob("*-old.npy")):
        return
    lost = {batch.index for batch in BatchStore(run.batches).all_lost()}
    for index in set(range(step, min(first + schedule.updates_per_stage, schedule.steps))) - lost:
        if not (path := run.old_logprobs_path(index)).exists():
            yield Damage(kind="old_logprobs", path=path, problem="missing", number=index)


def _others(run: RunDirectory) -> Iterator[Damage]:
    if run.model.is_dir():
        yield from _judged("model", run.model, -1, lambda: verify_folder(run.model, ""))
    for path in sorted((run.path / "finished").glob("[!.]*")):
        yield from _judged("finished", path, -1, lambda p=path: read_sealed(p, ""))  # type: ignore[misc]
    for folder in sorted((run.path / "epochs").glob("*")):
        yield from _judged("other", folder / "NEWEST", -1, lambda f=folder: newest(f))  # type: ignore[misc]
    for path in [*sorted((run.path / "engines").glob("*.json")), run.path / "learner.json"]:
        if path.exists():
            yield from _judged("other", path, -1, lambda p=path: read_sealed_json(p, ""))  # type: ignore[misc]


_WALKS: tuple[Callable[[RunDirectory], Iterator[Damage]], ...] = (
    _batches,
    _checkpoints,
    _policies,
    _control,
    _learned,
    _others,
)


def _judged(kind: Kind, path: Path, number: int, read: Callable[[], object]) -> Iterator[Damage]:
    try:
        read()
    except MemoryError:
        raise
    except (EvenKeelError, OSError, ValueError, KeyError, TypeError) as error:
        said = " ".join(str(error).split()).rstrip("; ") or type(error).__name__
        yield Damage(kind=kind, path=path, problem=said.removeprefix(f"{path} ").split("; ")[0], number=number)

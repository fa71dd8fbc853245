"""Find damage to a run directory, plan the repair, and carry it out.

`find_damage` is the single list of checks, for `evenkeel repair`, `verify history` and `fork`. Each file that a run
depends on is read by the run's own reader, and checked to belong to the run, to its number and to its sources, since an
intact file may lie in another's place. Foreign names are skipped, and so are files that only explain a run: logs,
metrics, events, spans, mismatch, the learner's log-probabilities, pages.

    batch        set aside, and the collector makes it again; recorded as lost where a checkpoint, or the version that
                 engines serve, has learned from it
    checkpoint   set aside: the learner goes on from the newest intact checkpoint, which has all that its next step
                 needs: the controller's record, and old log-probabilities of its stage
    policy       set aside: the learner publishes it again, or the version is history
    PUBLISHED    the newest intact policy; without any, the run restarts from the model folder's
    others       set aside: decided, scored, evaluated or written again where possible

Files are set aside in RUN/damaged/000001/, never deleted. RUN/repairs/000001.json gives the reasons and is created
last, exclusively. A killed repair can be repeated: files already set aside are then missing.
"""

from __future__ import annotations

import json
import os
import re
import socket
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Literal

from pipeline.control.files import ControlFiles
from pipeline.data.checksums import create_sealed, read_sealed, read_sealed_json, verify_folder, write_sealed
from pipeline.data.deltas import chain_to, is_whole
from pipeline.data.epochs import ROLES, newest
from pipeline.data.files import fsync_directory, machine_failure, make_folder
from pipeline.data.quant_maps import NumberedMaps, digest_of, older_folder, read_quant_map
from pipeline.data.run_directory import RunDirectory, numbered, numbered_files
from pipeline.data.run_recipes import all_recipes, recipe_of_step
from pipeline.data.store import (
    LOST_SUFFIX,
    REMOVED,
    BatchStore,
    Entry,
    Known,
    LostBatch,
    RemovedBatch,
    entry,
    groups_between,
)
from pipeline.errors import EvenKeelError, RunConflictError, StoreError
from pipeline.ports.weights import verify_policy
from pipeline.trainer.checkpoints import verify

Kind = Literal["batch", "gone", "checkpoint", "policy", "published", "old_logprobs", "foreign", "model", "record"]
_MANY = 4
"""The fewest similar failures of a kind that are no coincidence."""
_FOLDERS = (
    *(
        "batches",
        "batches/removed",
        "checkpoints",
        "policy",
        "policy/PUBLISHED",
        "logprobs",
        "mismatch",
        "evaluations",
        "control",
    ),
    *("quant_maps", "recipes", "epochs", "engines", "finished", "model", "skipped", "events", "metrics", "spans"),
    *("damaged", "repairs"),
)
_SEALED = (
    *("SANDBOX", "reference.json", "outside.json", "parent.json", "replay.json", "learner.json"),
    *("finished/collector", "finished/learner", "engines/router.json"),
)
_BECOMES: dict[Kind, str] = {
    "checkpoint": "set aside",
    "policy": "set aside",
    "old_logprobs": "set aside: the stage is scored again if it is trained again",
    "model": "set aside: it is exported again",
    "foreign": "set aside: it is not of this run",
    "record": "set aside: it is made again where the run needs it",
}


@dataclass(frozen=True, kw_only=True)
class Damage:
    kind: Kind
    path: Path
    problem: str
    number: int = -1
    """The batch, step or version in the file's name, else -1."""


@dataclass(frozen=True, kw_only=True)
class Repair:
    path: Path
    problem: str
    becomes: str
    """The outcome, in words."""
    lost: LostBatch | None = None
    """The record to write once the file is set aside."""
    text: str | None = None
    """The new content of a small file that can be rewritten."""


@dataclass
class Plan:
    """`repairs` in order of execution; `after` tells how the run goes on."""

    repairs: list[Repair] = field(default_factory=list)
    after: str = ""


def find_damage(run: RunDirectory) -> list[Damage]:
    """Check the whole run. Raises StoreError or RecipeError when FORMAT, recipe.yaml or a folder is unusable, and
    OSError when the machine fails to read: an intact file must not be set aside for that."""
    run.recipe()
    for folder in _FOLDERS:
        path = run.path / folder
        if os.path.lexists(path) and not path.is_dir():
            raise StoreError(f"{path} is no folder; move it elsewhere, then give the same command again")
    return [
        *_damaged_batches(run),
        *_damaged_checkpoints(run),
        *_damaged_policies(run),
        *_damaged_records(run),
    ]


def _judged(kind: Kind, path: Path, number: int, read: Callable[[], object]) -> Iterator[Damage]:
    try:
        read()
    except MemoryError:
        raise
    except (EvenKeelError, OSError, ValueError, LookupError, RecursionError) as error:  # others are bugs
        if (failure := machine_failure(error)) is not None:
            raise failure from None
        if not os.path.lexists(path):
            return  # deleted since it was listed, as old policies are during a run
        said = " ".join(str(error).split()).rstrip("; ") or type(error).__name__
        yield Damage(kind=kind, path=path, problem=said.removeprefix(f"{path} ").split("; ")[0], number=number)


def own_recipes(run: RunDirectory) -> set[str]:
    """Return the digests of all recipes that sampled the run's batches, before a fork too. Raises as `all_recipes`."""
    found = {one.sha256 for one in all_recipes(run.path)}
    with suppress(FileNotFoundError):
        found |= {*read_sealed_json(run.parent_file, "put back a copy, or fork the parent again")["recipes"]}
    return found


def _damaged_batches(run: RunDirectory) -> Iterator[Damage]:
    """Yield damaged batches and old log-probabilities, and those of another run or batch."""
    recipes, store, steps = own_recipes(run), BatchStore(run.batches), run.recipe().run.steps
    responses = dict[int, int]()

    def read(index: int) -> None:
        batch = store.read(index, None)
        if batch.recipe_sha256 not in recipes:
            raise StoreError("it is a batch of another run: that of no recipe of this one")
        responses[index] = batch.num_response_tokens

    learned = max(
        (step for step in [*run.saved_steps(), *numbered_files(run.published, "")] if step <= steps), default=0
    )
    for index in sorted({*store.holes(steps), *(set(range(learned)) - {*store.settled()})}):
        yield Damage(kind="batch", path=store.path(index), problem="missing", number=index)
    there: list[tuple[Kind, int, Path, Callable[[], object]]] = []
    lost = {*numbered_files(run.batches, LOST_SUFFIX)}
    there += [("batch", one, store.path(one), partial(read, one)) for one in store.committed() if one not in lost]
    for folder, kind in ((run.batches, LostBatch), (run.batches / REMOVED, RemovedBatch)):
        records = numbered_files(folder, kind.suffix)
        there += [("gone", index, path, partial(kind.read, path)) for index, path in records.items()]
    for what, index, path, check in there:
        if index >= steps:
            problem = f"a batch of another run: this one has {steps} steps"
            yield Damage(kind="foreign", path=path, problem=problem)
        else:
            yield from _judged(what, path, index, check)

    for step, path in numbered_files(run.logprobs, "-old.npy").items():
        yield from _judged("old_logprobs", path, step, partial(run.old_logprobs, step, responses.get(step)))


def _damaged_checkpoints(run: RunDirectory) -> Iterator[Damage]:
    """Yield damaged checkpoints, and intact ones that lack what their next step needs."""
    recipes, schedule = all_recipes(run.path), run.recipe().build_schedule()
    control, lost = ControlFiles(run.control, run.fence), numbered_files(run.batches, LOST_SUFFIX)

    def check(folder: Path, step: int) -> None:
        verify(folder, step)
        if recipe_of_step(recipes, step).controller is not None and control.read(step - 1) is None:
            raise StoreError(f"the controller's record of step {step - 1} is missing")
        begun = schedule.required_version(step)
        if schedule.kind != "staged" or {*range(begun, step)} <= {*run.skipped_steps()}:
            return
        for index in range(step, min(begun + schedule.updates_per_stage, schedule.steps)):
            if index not in lost and run.old_logprobs(index) is None and any(run.logprobs.glob("*-old.npy")):
                raise StoreError(f"log-probabilities of batch {index} from the beginning of its stage are missing")

    for step in run.saved_steps():
        folder = run.checkpoints / numbered(step)
        yield from _judged("checkpoint", folder, step, partial(check, folder, step))


def _damaged_policies(run: RunDirectory) -> Iterator[Damage]:
    steps, damaged = run.recipe().run.steps, set[int]()
    versions = [*numbered_files(run.policies, "")]

    def check(folder: Path, version: int) -> None:
        verify_policy(folder, version, "")
        for older in sorted((folder / "maps").glob("[!.]*")):  # for engines with an older quant map
            verify_policy(older, version, "")
            if older_folder(folder, digest_of(read_quant_map(older))) != older:
                raise StoreError(f"{older} holds weights for another quant map")

    def check_chain(version: int) -> None:
        for link in chain_to(run.policies, version):
            if link.version in damaged:
                raise StoreError(f"version {link.version}, which it is made from, is damaged")

    def check_announced(path: Path, version: int) -> None:
        if (said := read_sealed(path, "").strip()) != str(version):
            raise StoreError(f"it announces version {said[:100]}")

    for version in versions:
        folder = run.policy_directory(version)
        for damage in _judged("policy", folder, version, partial(check, folder, version)):
            damaged.add(version)
            yield damage
    for version in sorted({*versions} - damaged):
        if not is_whole(folder := run.policy_directory(version)):
            yield from _judged("policy", folder, version, partial(check_chain, version))
    for version in numbered_files(run.published, ""):
        path = run.published / numbered(version)
        if version > steps:
            problem = f"a version of another run: this one has {steps} steps"
            yield Damage(kind="foreign", path=path, problem=problem)
        else:
            yield from _judged("published", path, version, partial(check_announced, path, version))
    if versions and not run.is_published():
        yield Damage(kind="published", path=run.published, problem="it names no version")


def _damaged_records(run: RunDirectory) -> Iterator[Damage]:
    """Yield damaged small files with a checksum, and a damaged final model."""
    control, maps = ControlFiles(run.control, run.fence), NumberedMaps(run.quant_maps, run.fence)
    for step, path in numbered_files(run.control, ".json").items():
        yield from _judged("record", path, step, partial(control.read, step))
    for number, path in numbered_files(run.quant_maps, ".yaml").items():
        yield from _judged("record", path, -1, partial(maps.read, number))

    def check_evaluation(path: Path, version: int) -> None:
        found = read_sealed_json(path, "")
        if (due := found.get("due", found["version"])) != version:
            raise StoreError(f"it is that of version {str(due)[:100]}")

    for version, path in numbered_files(run.evaluations, ".json").items():
        yield from _judged("record", path, version, partial(check_evaluation, path, version))
    if run.model.is_dir():
        yield from _judged("model", run.model, -1, partial(verify_folder, run.model, ""))
    paths = [run.path / name for name in _SEALED] + [*numbered_files(run.path / "engines", ".json").values()]
    paths += [*numbered_files(run.path / "repairs", ".json").values()]
    paths += [*numbered_files(run.updates, ".json").values(), *numbered_files(run.updates, ".released").values()]
    for folder in sorted((run.path / "epochs").glob("*")):
        if folder.name.partition("-")[0] in ROLES:
            paths += numbered_files(folder, "").values()
            yield from _judged("record", folder / "NEWEST" if folder.is_dir() else folder, -1, partial(newest, folder))
    for path in filter(os.path.lexists, paths):
        yield from _judged("record", path, -1, partial(read_sealed, path, "", is_replaced=True))


def plan_repair(run: RunDirectory, found: list[Damage], recorded: str) -> Plan:
    """Plan the repair from the intact files. `recorded` gives time and process for records of losses. Raises as
    BatchStore.read, and RunConflictError for similar failures and for a fork without an intact checkpoint."""
    _refuse_alike(found)
    if not found:
        return Plan()
    damaged = {kind: {one.number for one in found if one.kind == kind} for kind in ("checkpoint", "policy")}
    steps = run.recipe().run.steps
    folders = numbered_files(run.policies, "")
    whole = sorted(set(folders) - damaged["policy"])
    served = [version for version in numbered_files(run.published, "") if version <= steps]
    published = max(served or whole) if whole else 0
    saved = sorted(set(run.saved_steps()) - damaged["checkpoint"], reverse=True)
    resume = next((step for step in saved if _can_go_on(run, step, published, whole)), 0)
    is_over = not any(one.path.parent.name == "finished" or one.kind == "model" for one in found) and run.is_finished()
    lost = "; ".join(f"{one.path.relative_to(run.path)}: {one.problem}" for one in found[:3])
    if (forked_at := run.forked_at()) > resume and not is_over:
        raise RunConflictError(
            f"{run.path} is a fork at step {forked_at} and holds nothing from which it could train that step "
            f"again ({lost}); remove it and fork its parent again, `evenkeel fork PARENT NEW --at {forked_at}`"
        )
    if (removed := max(BatchStore(run.batches).removed(), default=-1)) >= resume and not is_over:
        raise RunConflictError(
            f"{run.path} has no whole checkpoint from which it could go on ({lost}), and cannot be trained again from "
            f"its beginning: batches up to {removed} were removed by run.keep_batches; put back a copy of a checkpoint"
        )
    repairs = list[Repair]()
    for one in found:
        if one.kind == "published" and whole:
            version = one.number if one.number >= 0 else published
            path, text = run.published / numbered(version), f"{version}\n"
            becomes = f"written anew: version {version}"
            repairs.append(Repair(path=path, problem=one.problem, becomes=becomes, text=text))
        elif one.kind in _BECOMES:
            becomes = _BECOMES[one.kind]
            if one.kind == "policy" and one.number == published:
                becomes += " and published again"
            repairs.append(Repair(path=one.path, problem=one.problem, becomes=becomes))
    if not whole:
        becomes = "set aside: without a whole policy the model folder's is published, then the learner's"
        for version in numbered_files(run.published, ""):
            path = run.published / numbered(version)
            repairs.append(Repair(path=path, problem="no policy is whole", becomes=becomes))
    for step in (one for one in saved if one > resume):
        problem = "whole, but the version that it needs has to be published again, before its step"
        repairs.append(Repair(path=run.checkpoints / numbered(step), problem=problem, becomes="set aside"))
    finished = run.path / "finished" / "learner"
    if any(one.kind == "model" for one in found) and finished.exists():
        becomes = "set aside: what is left to do is found out again"
        repairs.append(Repair(path=finished, problem="the model has to be exported", becomes=becomes))
    repairs += _repaired_batches(run, found, recorded, resume=resume, published=published)
    return Plan(repairs, f"started again, the run goes on {f'from step {resume}' if resume else 'from its beginning'}")


def _refuse_alike(found: list[Damage]) -> None:
    """Raise RunConflictError where most files of a kind fail alike, by software: a repair would discard them."""
    alike = Counter[tuple[Kind, Path, str]]()
    for damage in found:
        if os.path.lexists(damage.path) and damage.kind not in (
            "foreign",
            "policy",
        ):  # one policy fails for another's damage
            alike[damage.kind, damage.path.parent, re.sub(r"\d+", "#", damage.problem)] += 1
    for (kind, folder, problem), count in alike.items():
        shapes = {re.sub(r"\d+", "#", one.path.name) for one in found if one.kind == kind}
        of_kind = sum(re.sub(r"\d+", "#", name) in shapes for name in os.listdir(folder))
        if count >= _MANY and 2 * count > of_kind:
            raise RunConflictError(
                f"{count} of {of_kind} files in {folder} fail alike ({problem}): that is a fault of the software, or "
                "of what put them there, rather than damage, and nothing is changed; read the run with the version of "
                "Even Keel and of its libraries that wrote it (its events name them), or, if they are damaged, put "
                "back copies, or move them elsewhere by hand: files that are missing are repaired"
            )


def _can_go_on(run: RunDirectory, step: int, published: int, whole: Collection[int]) -> bool:
    """Return whether engines serve the version that remaining batches need, or a resume at `step` publishes it."""
    schedule = run.recipe().build_schedule()
    settled = (index for index in BatchStore(run.batches).settled() if index < schedule.steps)
    missing = max(settled, default=-1) + 1
    if missing == schedule.steps or (schedule.publishes_after(step - 1) and schedule.allows(missing, step)):
        return True
    required, serves = schedule.required_version(missing), not whole or published in whole
    return (required <= published and serves) or step <= max(published, required)


def _repaired_batches(
    run: RunDirectory, found: list[Damage], recorded: str, *, resume: int, published: int
) -> Iterator[Repair]:
    """Yield the repairs of batches, ascending, since each rests on the batch before."""
    store, recipe = BatchStore(run.batches), run.recipe()
    entries: dict[int, Entry] = {}
    gone = {one.number: one for one in found if one.kind in ("batch", "gone")}
    there = {index for index in store.settled() if index < recipe.run.steps} - gone.keys()
    wanted = recipe.rollout.prompts_per_batch
    for index, damage in sorted(gone.items()):
        reason = "its record, lost or removed, is damaged"
        if damage.kind == "batch" and resume > index:
            reason = f"the checkpoint of step {resume} has learned from it"
        elif damage.kind == "batch" and published > index:
            reason = f"the engines serve version {published}, which has learned from it; its step is skipped"
        elif damage.kind == "batch":
            becomes = "set aside: the collector makes it again"
            yield Repair(path=damage.path, problem=damage.problem, becomes=becomes)
            continue
        before = entries[index - 1] if index - 1 in entries else entry(store, index - 1)
        after = min((one for one in there if one > index), default=None)
        known: Known = "first"
        if after is None:
            reclaimed = before.open_groups[:wanted]
            next_group = before.next_group + wanted - len(reclaimed)
            groups = (*reclaimed, *range(before.next_group, next_group))
            open_groups = tuple(sorted(set(before.open_groups) - set(groups)))
        else:
            behind = entry(store, after)
            between, further = groups_between(before, behind), after - index - 1
            groups = tuple(between[:wanted] if further else between)
            known = "together" if further or index - 1 in entries else "all"
            left = set(between) - set(groups)
            next_group, open_groups = behind.next_group, tuple(sorted({*behind.open_groups, *behind.groups, *left}))
        lost = entries[index] = LostBatch(
            index=index,
            reason=damage.problem,
            recorded=recorded,
            learned=resume > index,
            groups=groups,
            known=known,
            next_group=next_group,
            open_groups=open_groups,
        )
        yield Repair(path=damage.path, problem=damage.problem, becomes=f"recorded as lost: {reason}", lost=lost)


def stamp() -> str:
    """Return the UTC time and this process, for records."""
    when = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
    return f"{when} by process {os.getpid()} on {socket.gethostname()}"


def apply(run: RunDirectory, plan: Plan) -> Path:
    """Carry out a plan; return the folder of the damaged files. Raises OSError, also beside another repair."""
    number = _next_number(run)
    for repair in plan.repairs:
        set_aside(run, [repair.path])
        if repair.lost is not None:
            with suppress(FileExistsError):
                repair.lost.write(run.batches / f"{numbered(repair.lost.index)}{LOST_SUFFIX}")
        if repair.text is not None:
            make_folder(repair.path.parent)
            write_sealed(repair.path, repair.text)
    done = [
        dict(path=str(one.path.relative_to(run.path)), problem=one.problem, becomes=one.becomes) for one in plan.repairs
    ]
    make_folder(run.path / "repairs")
    record = json.dumps(dict(recorded=stamp(), repairs=done)) + "\n"
    create_sealed(run.path / "repairs" / f"{numbered(number)}.json", record)
    return run.path / "damaged" / numbered(number)


def set_aside(run: RunDirectory, paths: Iterable[Path]) -> None:
    """Move files and folders to the next repair's folder; missing paths are skipped."""
    folder = run.path / "damaged" / numbered(_next_number(run))
    for path in filter(os.path.lexists, paths):
        target = folder / path.relative_to(run.path)
        while os.path.lexists(target):  # left by a killed repair
            target = target.with_name(f"{target.name}.again")
        make_folder(target.parent)
        path.rename(target)
        fsync_directory(target.parent)
        fsync_directory(path.parent)


def repaired_paths(run: RunDirectory) -> set[str]:
    """Return all paths, relative to the run, that repairs have set aside or rewritten. Raises StoreError."""
    remedy = "remove it: it only records what was repaired"
    records = (read_sealed_json(path, remedy) for path in numbered_files(run.path / "repairs", ".json").values())
    return {str(one["path"]) for record in records for one in record["repairs"]}


def _next_number(run: RunDirectory) -> int:
    return max(numbered_files(run.path / "repairs", ".json"), default=0) + 1

"""Name, read and write the files of a run directory.

    runs/NAME/
      FORMAT                   the layout of the directory (pipeline.data.run_recipes)
      recipe.yaml              resolved and frozen at the first start
      recipes/000001.yaml      the recipe as changed by a later start (pipeline.data.run_recipes)
      batches/000012.zarr.zip  one committed batch, one file (pipeline.data.store)
      policy/000012/           version 12, HF safetensors or a delta; policy/PUBLISHED/000012: engines serve it
      logprobs/000012.npy      the learner's log-probabilities of batch 12 before it trained on it (float32 [responses])
      logprobs/000012-old.npy  … and when the batch's stage began, where pi_old is needed
      mismatch/000012.zarr.zip learner against engine on batch 12, in all detail (pipeline.data.mismatch_files)
      evaluations/000012.json  held-out pass@k, due at version 12, and some of the answers
      checkpoints/000012/      Megatron distributed checkpoint + COMMIT, written last
      model/                   the final policy in full precision
      policy/updates/000031    a number taken by each weight update of engines, before it starts
      engines/000003.json      the address of engine 3 (pipeline.data.membership; never its key)
      epochs/learner/000002    the second start of the learner (pipeline.data.epochs)
      learner.json             the address of node 0 for the other nodes of the learner (launch.roles.lifecycle)
      control/000012.json      the ESS controller's evidence and decision after step 12 (pipeline.control.files)
      quant_maps/000001.yaml   a quant map that it decided on (pipeline.data.quant_maps)
      batches/000012.lost.json batch 12 was lost by damage; batches/removed/000012.json: removed (pipeline.data.store)
      skipped/000012           the learner skipped its step
      SANDBOX                  the sandbox that the run's reward code began in (launch.build.rewards)
      reference.json           digests of the reference policy that the run began with (pipeline.trainer.old_logprobs)
      attempts.jsonl           attempts at each problem by batch (pipeline.rollout.batch_builder.AttemptsLog)
      outside.json             files outside of the run: weights, code of rewards (pipeline.resume)
      parent.json              the run and step of which this run is a fork (launch.fork)
      replay.json              the run of which this run is the replay (launch.run.replay)
      damaged/000001/          files that a repair set aside; repairs/000001.json: the reasons (pipeline.repair)
      finished/ROLE            made by the learner and by the collector, once each has nothing left to do
      metrics/SOURCE.jsonl  events/SOURCE.jsonl  spans/SOURCE.jsonl  logs/  report.html  samples.html
      trace.json  exports/     for people: no process decides by them. SOURCE: a role and its start

Small files are replaced atomically (temporary name, fsync, rename), so a reader sees the old or the new, never half.
Every file but logs/, exports/, *.html and trace.json has a checksum for readers (pipeline.data.checksums). Visible
files are written under a fence: a superseded process raises, and writes nothing.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from pipeline.config.recipe import Recipe
from pipeline.data.checksums import (
    create_sealed,
    read_sealed,
    read_sealed_array,
    read_sealed_json,
    write_sealed,
    write_sealed_array,
    write_sealed_json,
)
from pipeline.data.epochs import Epoch
from pipeline.data.files import NUMBER, changed_ns, fsync_present, make_folder, write_atomically
from pipeline.data.membership import Membership
from pipeline.data.run_recipes import begin_recipe, recipe_in_force, refuse_another_recipe
from pipeline.errors import StoreError

_NUMBER = re.compile(rf"(?:{NUMBER})")
_FINISHED = "nothing is left to do\n"


def unfenced() -> None:
    """Do nothing: the fence of a process that nothing can supersede, such as a reader."""


@dataclass(frozen=True)
class _Within:
    name: str

    def __get__(self, run: RunDirectory, _: type[RunDirectory] | None = None) -> Path:
        return run.path / self.name


@dataclass(frozen=True)
class RunDirectory:
    path: Path
    fence: Callable[[], None] = field(default=unfenced, compare=False, repr=False)
    """A function called before every visible write; raises SupersededError."""

    batches = _Within("batches")
    policies = _Within("policy")
    checkpoints = _Within("checkpoints")
    logprobs = _Within("logprobs")
    mismatch = _Within("mismatch")
    skipped = _Within("skipped")
    """A file for each step that was skipped because its batch was lost by damage."""
    evaluations = _Within("evaluations")
    logs = _Within("logs")
    control = _Within("control")
    quant_maps = _Within("quant_maps")
    """Quant maps that the ESS controller decided on."""
    model = _Within("model")
    """The final policy in full precision, an HF folder."""
    model_manifest = _Within("model/manifest.json")
    """Every tensor of the final policy. Without it, the folder is of an earlier end, with fewer steps."""
    sandbox_file = _Within("SANDBOX")
    """The sandbox that the run's reward code began in."""
    reference_file = _Within("reference.json")
    attempts_file = _Within("attempts.jsonl")
    outside_file = _Within("outside.json")
    """Files outside of the run (pipeline.resume)."""
    parent_file = _Within("parent.json")
    """The run and step that this run was forked from."""
    updates = _Within("policy/updates")
    """A file per weight update, named by its number."""
    published = _Within("policy/PUBLISHED")

    def under(self, epoch: Epoch) -> RunDirectory:
        """Return the run for a process that ends when its epoch is superseded."""
        return replace(self, fence=epoch.check)

    def forked_at(self) -> int:
        """Return the step at which the run begins; 0 unless it is a fork."""
        with suppress(FileNotFoundError):
            return int(read_sealed_json(self.parent_file, "put back a copy, or fork the parent again")["step"])
        return 0

    def sandbox(self) -> str | None:
        """Return the sandbox that the run's reward code began in, or None."""
        with suppress(FileNotFoundError):
            return read_sealed(self.sandbox_file, "remove it: it is written anew").strip()
        return None

    def membership(self, given: Sequence[str] = ()) -> Membership:
        """Return the run's engines and router; `given` URLs (rollout.urls) replace the engines."""
        return Membership(self.path / "engines", tuple(given))

    def policy_directory(self, version: int) -> Path:
        """Return the HF folder of a published version, in the rollout's format."""
        return self.policies / numbered(version)

    def newest_policy(self, at_most: int) -> int:
        """Return the newest version up to `at_most` with a complete folder. Raises StoreError without one."""
        allowed = [version for version in numbered_folders(self.policies) if version <= at_most]
        if not allowed:
            raise StoreError(
                f"{self.policies} holds no policy up to version {at_most}; stop the run and repair it: "
                f"`evenkeel repair {self.path}`"
            )
        return max(allowed)

    def is_published(self) -> bool:
        """Return whether any version is published."""
        return bool(numbered_files(self.published, ""))

    def published_version(self) -> int:
        """Return the version that every admitted engine serves. Raises StoreError without one, and for damage."""
        folder, remedy = self.published, f"repair the run: `evenkeel repair {self.path}`"
        give_up = time.monotonic() + _REREAD_S
        while not (found := numbered_files(folder, "")):
            if time.monotonic() > give_up:
                raise StoreError(
                    f"{folder} names no version; start the run with `evenkeel train`, or, if it has begun, "
                    f"repair it: `evenkeel repair {self.path}`"
                )
            time.sleep(_REREAD_S / 20)
        version, path = [*found.items()][-1]
        try:
            said = read_sealed(path, remedy).strip()
        except FileNotFoundError:
            return version  # a higher one replaced it: a cached listing may name it for a minute
        if said != str(version):
            raise StoreError(f"{path} says version {said[:100]}; {remedy}")
        return version

    def set_published(self, version: int) -> None:
        """Announce that every admitted engine serves `version`; the published version never falls."""
        make_folder(self.published)
        self.fence()
        with suppress(FileExistsError):
            create_sealed(self.published / numbered(version), f"{version}\n")
        found = numbered_files(self.published, "")
        if max(found) == version:
            for older in [*found.values()][:-_KEPT]:
                older.unlink(missing_ok=True)

    def write_logprobs(self, step: int, logprobs: NDArray[np.float32], *, old: bool = False) -> None:
        """Store the learner's log-probabilities [responses] of batch `step` before training; `old`: of its stage."""
        self.fence()
        write_sealed_array(self.logprobs / f"{numbered(step)}{'-old' if old else ''}.npy", logprobs)

    def learner_logprobs(self, step: int, responses: int | None = None) -> NDArray[np.float32] | None:
        """Return the stored log-probabilities; None before batch `step` is trained, and for a file that is unreadable
        or has not so many `responses`, since it decides nothing."""
        with suppress(OSError, StoreError):
            values = read_sealed_array(self.logprobs / f"{numbered(step)}.npy", "training does not need it")
            return values if values is None or responses in (None, len(values)) else None
        return None

    def old_logprobs(self, step: int, responses: int | None = None) -> NDArray[np.float32] | None:
        """Return the stored `old` log-probabilities, if any. Raises StoreError for damage or not `responses` values."""
        path = self.logprobs / f"{numbered(step)}-old.npy"
        remedy = f"`evenkeel repair {self.path}` goes back to where its stage is scored again"
        values = read_sealed_array(path, remedy)
        if values is not None and responses not in (None, len(values)):
            raise StoreError(
                f"{path} holds {len(values)} log-probabilities, but its batch has {responses} response tokens; {remedy}"
            )
        return values

    def saved_steps(self) -> list[int]:
        """Return the steps of committed checkpoints, ascending (pipeline.trainer.checkpoints checks the rest)."""
        return committed_steps(self.checkpoints)

    def num_settled(self) -> int:
        """Return the number of steps sampled, trained or published: from 1 on, the run is bound to its recipe."""
        batches = [*numbered_files(self.batches, ".zarr.zip"), *numbered_files(self.batches, ".lost.json")]
        sampled = 1 + max(batches, default=-1)
        return max(sampled, self.num_learned())

    def num_learned(self) -> int:
        """Return the number of steps that a checkpoint, or the version that engines serve, has learned from."""
        published = self.published_version() if self.is_published() else 0
        return max(published, *self.saved_steps(), 0)

    def why_not_sampled(self, index: int) -> str | None:
        """Return why batch `index` cannot be sampled (a checkpoint or the served version learned from it), or None."""
        saved = max(self.saved_steps(), default=0)
        if saved > index:
            return f"the checkpoint of step {saved} has learned from it"
        published = self.published_version() if self.is_published() else 0
        if published > index:
            return f"the engines serve version {published}, which has learned from it"
        return None

    def note_skipped(self, step: int) -> None:
        """Record that the learner skipped `step`, because its batch was lost by damage."""
        self.fence()
        make_folder(self.skipped)
        write_atomically(self.skipped / numbered(step), "")  # the name is the record

    def skipped_steps(self) -> list[int]:
        """Return the steps of `note_skipped`, ascending."""
        return [*numbered_files(self.skipped, "")]

    def trained_at_ns(self) -> int:
        """Return a time that changes with every trained step, also again after a resume; 0 before the run begins."""
        return changed_ns(self.logprobs)

    def sampled_at_ns(self) -> tuple[int, int]:
        """Return times that change with every commit of a batch, and with every evaluation: counting either would list
        as many files as the run has steps."""
        return changed_ns(self.batches), changed_ns(self.evaluations)

    def write_evaluation(self, version: int, result: Mapping[str, Any]) -> None:
        """Store the result of the evaluation due at a version, which is not made again. `result` may have another
        `version`, the one that answered."""
        self.fence()
        write_sealed_json(self.evaluations / f"{numbered(version)}.json", dict(version=version) | dict(result))

    def evaluation(self, version: int) -> dict[str, Any]:
        """Read `write_evaluation`. Raises StoreError for damage."""
        remedy = f"`evenkeel repair {self.path}` writes it anew"
        return read_sealed_json(self.evaluations / f"{numbered(version)}.json", remedy)

    def evaluated_versions(self) -> set[int]:
        """Return the versions at which the evaluations were due."""
        return set(numbered_files(self.evaluations, ".json"))

    def set_finished(self, role: Literal["learner", "collector"]) -> None:
        """Record that the learner has trained and written the model, or the collector has evaluated all versions."""
        self.fence()
        fsync_present(self.path, self.batches, self.policies, self.logprobs, self.mismatch, self.evaluations)
        fsync_present(self.checkpoints, self.control, self.quant_maps)
        folder = self.path / "finished"
        make_folder(folder)
        write_sealed(folder / role, _FINISHED)

    def is_finished(self) -> bool:
        """Return whether both roles have finished. Raises StoreError for a damaged record."""
        remedy = "remove it: the same command then finds out what is left to do"
        with suppress(FileNotFoundError, NotADirectoryError):
            files = (self.path / "finished" / role for role in ("learner", "collector"))
            return all(read_sealed(path, remedy, is_replaced=True) == _FINISHED for path in files)
        return False

    def make_folders(self) -> None:
        written = (self.batches, self.policies, self.logprobs, self.mismatch, self.evaluations, self.checkpoints)
        for folder in (*written, self.logs):
            make_folder(folder)

    def freeze(self, recipe: Recipe) -> Recipe:
        """Store the recipe at the first start; later, refuse another one (RunConflictError names the keys)."""
        begin_recipe(self.path, recipe)
        refuse_another_recipe(self.path, self.recipe(), recipe)
        self.make_folders()
        return recipe

    def recipe(self) -> Recipe:
        """Return the recipe in force. Raises StoreError for none or another RUN_FORMAT, and RecipeError for damage."""
        return recipe_in_force(self.path).recipe

    @property
    def shared_folders(self) -> list[Path]:
        """The folders in which several roles write small files."""
        epochs = self.path / "epochs"
        named = (self.path, self.path / "finished", self.path / "engines", self.logs / "fatal")
        return [*named, self.updates, self.published, *(epochs.iterdir() if epochs.is_dir() else ())]


def numbered(number: int) -> str:
    """Return a version, step or batch as written in names of files and folders."""
    return f"{number:06d}"


def committed_steps(checkpoints: Path) -> list[int]:
    """Return the steps of checkpoints with COMMIT, which is written last, ascending."""
    return [step for step in numbered_files(checkpoints, "") if (checkpoints / numbered(step) / "COMMIT").exists()]


def numbers_of(directory: Path, *endings: str) -> list[int]:
    """Return the numbers for which `directory` has a file named by the number and one of `endings`, ascending."""
    named = re.compile(rf"({NUMBER})(?:{'|'.join(map(re.escape, endings))})")
    names = os.listdir(directory) if directory.is_dir() else ()
    return sorted({int(match[1]) for match in map(named.fullmatch, names) if match})


def numbered_files(directory: Path, ending: str) -> dict[int, Path]:
    """Return number → file in `directory`, for names of a number and `ending`, ascending."""
    return {number: directory / f"{numbered(number)}{ending}" for number in numbers_of(directory, ending)}


def numbered_folders(directory: Path) -> list[int]:
    """Return the numbers that name folders or files of `directory`, ascending."""
    return sorted(int(path.name) for path in directory.iterdir() if _NUMBER.fullmatch(path.name))


_KEPT = 3
"""Announcements that stay: a slightly old listing may still name the one before the highest."""
_REREAD_S = 1.0
"""Seconds before a missing announcement is believed: shared file systems may hide it for a moment."""

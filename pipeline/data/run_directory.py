"""Where everything of a run lies, and the few small files that processes share.

    runs/NAME/
      FORMAT                   which layout of the directory this is (pipeline.data.run_recipes)
      recipe.yaml              resolved and frozen at the first start
      recipes/000001.yaml      what a later start changed it to (pipeline.data.run_recipes)
      batches/000012.zarr.zip  one committed batch, one file (pipeline.data.store)
      policy/000012/           version 12, HF safetensors or a delta; policy/PUBLISHED/000012: engines serve it
      logprobs/000012.npy      the learner's log-probabilities of batch 12 before it trained on it (float32 [responses])
      logprobs/000012-old.npy  … and when the batch's stage began, where pi_old is needed
      mismatch/000012.zarr.zip learner against engine on batch 12, in all detail (pipeline.data.mismatch_files)
      evaluations/000012.json  held-out pass@k of version 12, and some of its answers
      checkpoints/000012/      Megatron distributed checkpoint + COMMIT, written last
      model/                   the final policy in full precision
      policy/updates/000031    made by whoever gives weights to engines, before it does
      engines/000003.json      engine 3 listens there (pipeline.data.membership; never its key)
      epochs/learner/000002    the second start of the learner (pipeline.data.epochs)
      learner.json             where the nodes of the learner find node 0 (launch.roles.base)
      control/000012.json      what the ESS controller saw and decided after step 12 (pipeline.control.files)
      quant_maps/000001.yaml   a quant map that it decided on (pipeline.data.quant_maps)
      batches/000012.lost.json batch 12 was lost by damage (pipeline.data.store)
      skipped/000012           its step was skipped: made by the learner
      SANDBOX                  the sandbox that the run's reward code began in (launch.build.rewards)
      reference.json           digests of the reference policy that the run began with (pipeline.trainer.old_logprobs)
      outside.json             what it reads that lies elsewhere: weights, code of rewards (pipeline.resume)
      parent.json              of which run, and which of its steps, this one is a fork (launch.fork)
      replay.json              of which run this one is the replay (launch.run.replay)
      damaged/000001/          what a repair has set aside; repairs/000001.json says why (pipeline.repair)
      finished/ROLE            made by the learner and by the collector, once each has nothing left to do
      metrics/SOURCE.jsonl  events/SOURCE.jsonl  spans/SOURCE.jsonl  logs/  report.html  samples.html
      trace.json  exports/     for people: no process decides by them. SOURCE: a role and its start

Small files are replaced atomically (temporary name, fsync, rename), so a reader sees the old or the new, never half.
Every file but logs/, exports/, *.html and trace.json has a checksum for readers (pipeline.data.checksums).
What others could see is written under a fence: a process that a later start has superseded raises, and writes nothing.
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
from pipeline.data.files import NUMBER, fsync_present, make_folder, write_atomically
from pipeline.data.membership import Membership
from pipeline.data.run_recipes import begin_recipe, recipe_in_force, refuse_another_recipe
from pipeline.errors import StoreError

_NUMBER = re.compile(rf"(?:{NUMBER})")
_FINISHED = "nothing is left to do\n"


def unfenced() -> None:
    """The fence of a process that nothing can supersede: readers, tests, a run on this machine alone."""


@dataclass(frozen=True)
class _Within:
    """The path of a file or folder within the run directory."""

    name: str

    def __get__(self, run: RunDirectory, _: type[RunDirectory] | None = None) -> Path:
        return run.path / self.name


@dataclass(frozen=True)
class RunDirectory:
    """Name, read and write the files of one run."""

    path: Path
    fence: Callable[[], None] = field(default=unfenced, compare=False, repr=False)
    """Called before everything that others could see; raises SupersededError."""

    batches = _Within("batches")
    policies = _Within("policy")
    checkpoints = _Within("checkpoints")
    logprobs = _Within("logprobs")
    mismatch = _Within("mismatch")
    skipped = _Within("skipped")
    """One file for each step that was skipped because its batch was lost by damage, named by its number."""
    evaluations = _Within("evaluations")
    logs = _Within("logs")
    control = _Within("control")
    """Records of the ESS controller."""
    quant_maps = _Within("quant_maps")
    """Quant maps that the ESS controller decided on."""
    model = _Within("model")
    """The final policy in full precision, an HF folder."""
    model_manifest = _Within("model/manifest.json")
    """Every tensor of the final policy. Without it the folder is that of an earlier end, of fewer steps."""
    sandbox_file = _Within("SANDBOX")
    """Names the sandbox that the run's reward code began in."""
    reference_file = _Within("reference.json")
    """Digests of the reference policy's files."""
    outside_file = _Within("outside.json")
    """What the run reads that lies outside of it (pipeline.resume)."""
    parent_file = _Within("parent.json")
    """Of which run, and at which of its steps, this one is a fork."""
    updates = _Within("policy/updates")
    """One file a weight update, named by its number."""
    published = _Within("policy/PUBLISHED")
    """Announcements of versions."""

    def under(self, epoch: Epoch) -> RunDirectory:
        """Return the same run for a process that ends when its epoch is superseded."""
        return replace(self, fence=epoch.check)

    def forked_at(self) -> int:
        """Return the step at which the run begins; 0 for one that is no fork."""
        with suppress(FileNotFoundError):
            return int(read_sealed_json(self.parent_file, "put back a copy, or fork the parent again")["step"])
        return 0

    def sandbox(self) -> str | None:
        """Return the sandbox that the run's reward code began in; None before, or where there is none."""
        with suppress(FileNotFoundError):
            return read_sealed(self.sandbox_file, "remove it: it is written anew").strip()
        return None

    def membership(self, given: Sequence[str] = ()) -> Membership:
        """Return the run's engines and router. Where URLs are given (rollout.urls), the engines are those."""
        return Membership(self.path / "engines", tuple(given))

    def policy_directory(self, version: int) -> Path:
        """HF folder of one published version, in the rollout's format."""
        return self.policies / numbered(version)

    def newest_policy(self, at_most: int) -> int:
        """Return the newest version, `at_most` or older, whose folder is complete. Raises StoreError when there is
        none."""
        allowed = [version for version in numbered_folders(self.policies) if version <= at_most]
        if not allowed:
            raise StoreError(
                f"{self.policies} holds no policy up to version {at_most}; stop the run and repair it: "
                f"`evenkeel repair {self.path}`"
            )
        return max(allowed)

    def is_published(self) -> bool:
        """Return whether the run has any policy yet."""
        return bool(announced(self.published))

    def published_version(self) -> int:
        """Return the version that every admitted engine serves. Raises StoreError when there is none, or when its file
        is damaged."""
        folder, remedy = self.published, f"repair the run: `evenkeel repair {self.path}`"
        give_up = time.monotonic() + _REREAD_S
        while not (found := announced(folder)):
            if time.monotonic() > give_up:
                raise StoreError(
                    f"{folder} names no version; start the run with `evenkeel train`, or, if it has begun, "
                    f"repair it: `evenkeel repair {self.path}`"
                )
            time.sleep(_REREAD_S / 20)
        version = found[-1]
        path = folder / numbered(version)
        try:
            said = read_sealed(path, remedy).strip()
        except FileNotFoundError:
            return version  # a higher one came, and this one went: a cached listing may name it for a minute
        if said != str(version):
            raise StoreError(f"{path} says version {said[:100]}; {remedy}")
        return version

    def set_published(self, version: int) -> None:
        """Announce that every admitted engine serves `version`; what is published never falls."""
        make_folder(self.published)
        self.fence()
        with suppress(FileExistsError):
            create_sealed(self.published / numbered(version), f"{version}\n")
        found = announced(self.published)
        if found[-1] == version:
            for older in found[:-_KEPT]:
                (self.published / numbered(older)).unlink(missing_ok=True)

    def write_logprobs(self, step: int, logprobs: NDArray[np.float32], *, old: bool = False) -> None:
        """Keep the learner's log-probabilities of batch `step`, [responses], from before it trained on it; `old` ones
        from when the batch's stage began."""
        self.fence()
        write_sealed_array(self.logprobs / f"{numbered(step)}{'-old' if old else ''}.npy", logprobs)

    def learner_logprobs(self, step: int, responses: int | None = None) -> NDArray[np.float32] | None:
        """Return what `write_logprobs` kept. None when batch `step` is not trained yet, and where the file
        cannot be read or is of another batch, not of so many `responses`: it explains a run, and decides nothing."""
        with suppress(OSError, StoreError):
            values = read_sealed_array(self.logprobs / f"{numbered(step)}.npy", "training does not need it")
            return values if values is None or responses in (None, len(values)) else None
        return None

    def old_logprobs(self, step: int, responses: int | None = None) -> NDArray[np.float32] | None:
        """Return what `write_logprobs` kept of `old` ones, or None when the batch's stage has not begun. Raises
        StoreError when it is damaged, or of another batch: not of so many `responses`."""
        path = self.logprobs / f"{numbered(step)}-old.npy"
        remedy = f"`evenkeel repair {self.path}` goes back to where its stage is scored again"
        values = read_sealed_array(path, remedy)
        if values is not None and responses not in (None, len(values)):
            raise StoreError(
                f"{path} holds {len(values)} log-probabilities, but its batch has {responses} response tokens; {remedy}"
            )
        return values

    def saved_steps(self) -> list[int]:
        """Steps of the checkpoints that have their COMMIT, ascending (pipeline.trainer.checkpoints checks the rest)."""
        return committed_steps(self.checkpoints)

    def num_settled(self) -> int:
        """Steps that are sampled, trained or published: from 1 on, the run is bound to its recipe."""
        batches = [*numbered_files(self.batches, ".zarr.zip"), *numbered_files(self.batches, ".lost.json")]
        sampled = 1 + max(batches, default=-1)
        return max(sampled, self.num_learned())

    def num_learned(self) -> int:
        """Steps that a checkpoint, or the version that engines serve, has learned from."""
        published = self.published_version() if self.is_published() else 0
        return max(published, *self.saved_steps(), 0)

    def why_not_sampled(self, index: int) -> str | None:
        """Return why batch `index` cannot be sampled now, or again: a checkpoint has learned from one, or engines serve
        a version that has, and the schedule allows no answer of it. None where it can."""
        saved = max(self.saved_steps(), default=0)
        if saved > index:
            return f"the checkpoint of step {saved} has learned from it"
        published = self.published_version() if self.is_published() else 0
        if published > index:
            return f"the engines serve version {published}, which has learned from it"
        return None

    def note_skipped(self, step: int) -> None:
        """Keep that the learner went past `step` without training, because its batch was lost by damage."""
        self.fence()
        make_folder(self.skipped)
        write_atomically(self.skipped / numbered(step), "")  # its name says all

    def skipped_steps(self) -> list[int]:
        """Return what `note_skipped` kept, ascending."""
        return [*numbered_files(self.skipped, "")]

    def trained_at_ns(self) -> int:
        """Changes with every step that the learner trains, also again after a resume: each leaves its logprobs. 0 where
        no learner has begun the run."""
        with suppress(FileNotFoundError):
            return self.logprobs.stat().st_mtime_ns
        return 0

    def write_evaluation(self, version: int, result: Mapping[str, Any]) -> None:
        """Keep what a version reached on the held-out prompts; it is not evaluated again."""
        self.fence()
        write_sealed_json(self.evaluations / f"{numbered(version)}.json", dict(version=version, **result))

    def evaluation(self, version: int) -> dict[str, Any]:
        """Return what `write_evaluation` kept. Raises StoreError when it is damaged."""
        remedy = f"`evenkeel repair {self.path}` writes it anew"
        return read_sealed_json(self.evaluations / f"{numbered(version)}.json", remedy)

    def evaluated_versions(self) -> set[int]:
        """Versions that have been evaluated."""
        return set(numbered_files(self.evaluations, ".json"))

    def set_finished(self, role: Literal["learner", "collector"]) -> None:
        """The learner has trained the last step and written the model; the collector has evaluated the last version."""
        self.fence()
        fsync_present(self.path, self.batches, self.policies, self.logprobs, self.mismatch, self.evaluations)
        fsync_present(self.checkpoints, self.control, self.quant_maps)
        folder = self.path / "finished"
        make_folder(folder)
        write_sealed(folder / role, _FINISHED)

    def is_finished(self) -> bool:
        """Return whether both have: there is nothing left to do. Raises StoreError when a file that says so is
        damaged."""
        remedy = "remove it: the same command then finds out what is left to do"
        with suppress(FileNotFoundError, NotADirectoryError):
            files = (self.path / "finished" / role for role in ("learner", "collector"))
            return all(read_sealed(path, remedy, is_replaced=True) == _FINISHED for path in files)
        return False

    def make_folders(self) -> None:
        """Create what is missing of the folders."""
        written = (self.batches, self.policies, self.logprobs, self.mismatch, self.evaluations, self.checkpoints)
        for folder in (*written, self.logs):
            make_folder(folder)

    def freeze(self, recipe: Recipe) -> Recipe:
        """Store the recipe at the first start; refuse another one later (RunConflictError names the keys). Where some
        keys may change: pipeline.resume."""
        begin_recipe(self.path, recipe)
        refuse_another_recipe(self.path, self.recipe(), recipe)
        self.make_folders()
        return recipe

    def recipe(self) -> Recipe:
        """Return the recipe that the run goes by. Raises StoreError when there is none or when another version of Even
        Keel made the run, RecipeError when the file was damaged."""
        return recipe_in_force(self.path).recipe

    @property
    def shared_folders(self) -> list[Path]:
        """Those in which several roles write small files."""
        epochs = self.path / "epochs"
        named = (self.path, self.path / "finished", self.path / "engines", self.logs / "fatal")
        return [*named, self.updates, self.published, *(epochs.iterdir() if epochs.is_dir() else ())]


def numbered(number: int) -> str:
    """Return how a version, a step or a batch is written in the names of files and folders."""
    return f"{number:06d}"


def committed_steps(checkpoints: Path) -> list[int]:
    """Steps of the checkpoints in a folder that have their COMMIT, which is written last; ascending."""
    return [step for step in numbered_files(checkpoints, "") if (checkpoints / numbered(step) / "COMMIT").exists()]


def numbered_files(directory: Path, ending: str) -> dict[int, Path]:
    """Return number → file of `directory` that is named by it and `ending`, ascending. Others are not ours."""
    names = os.listdir(directory) if directory.is_dir() else []
    named = {name.removesuffix(ending): directory / name for name in names if name.endswith(ending)}
    return {int(stem): named[stem] for stem in sorted(filter(_NUMBER.fullmatch, named), key=int)}


def numbered_folders(directory: Path) -> list[int]:
    """Return the numbers that name folders, or files, of `directory`, ascending."""
    return sorted(int(path.name) for path in directory.iterdir() if _NUMBER.fullmatch(path.name))


_KEPT = 3
"""Announcements that stay: a listing of a moment ago may still name the one before the highest."""
_REREAD_S = 1.0
"""How long none is taken for one that a file system of several hosts does not show for a moment."""


def announced(folder: Path) -> list[int]:
    """Return the versions that have a file, ascending; none where the folder is missing."""
    with suppress(FileNotFoundError):
        return sorted(int(name) for name in os.listdir(folder) if _NUMBER.fullmatch(name))
    return []

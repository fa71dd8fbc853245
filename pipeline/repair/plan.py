"""What becomes of damage: decided from the files that are whole, before anything is changed.

batch        not learned from by a checkpoint or a version that engines serve: set aside, the collector makes it
             again; else recorded as lost
checkpoint   set aside: the learner goes on from the newest whole one from which the run can go on
policy       set aside: the learner publishes it again, or the version is history
PUBLISHED    the newest whole policy; without any, the run begins again with that of the model folder
log          written anew, without the lines that are damaged
record       set aside; the steps that need it are decided, scored or evaluated again where that can be
"""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

from pipeline.config.recipe import Recipe
from pipeline.data.event_log import read_events, whole_lines
from pipeline.data.run_directory import RunDirectory, announced, numbered, numbered_folders
from pipeline.data.run_recipes import RecipeInForce, all_recipes, recipe_of_step
from pipeline.data.store import BatchStore, Entry, Known, LostBatch, entry, groups_between, open_before
from pipeline.errors import RunConflictError
from pipeline.repair.damage import Damage, Kind

_MANY = 4
"""Files of a kind that fail alike by chance are fewer."""


@dataclass(frozen=True, kw_only=True)
class Repair:
    """One file or folder, and what becomes of it."""

    path: Path
    problem: str
    becomes: str
    """For people."""
    set_aside: bool = True
    lost: LostBatch | None = None
    """Written once the file is set aside."""
    text: str | None = None
    """What the file holds from then on, where it is a small one that can be written anew."""


@dataclass
class Plan:
    """`repairs` in the order in which they are made; `after` says how the run goes on."""

    repairs: list[Repair] = field(default_factory=list)
    after: str = ""


def plan_repair(run: RunDirectory, found: list[Damage], recorded: str) -> Plan:
    """`recorded` says when and by whom, for records of losses. Raises RunConflictError for a fork that has no whole
    checkpoint of its own to go on from, and where most files of a kind fail alike, and as BatchStore.read does."""
    _refuse_alike(found)
    return _Planner(run, found, recorded).plan() if found else Plan()


def _refuse_alike(found: list[Damage]) -> None:
    """Raises RunConflictError where most files of a kind fail alike: no disk does that, but a version of the software
    that cannot read them does, and a repair would throw them away."""
    alike = Counter[tuple[Kind, Path, str]]()
    for damage in found:
        if not damage.is_missing and damage.kind not in ("foreign", "policy"):  # one policy fails for another's damage
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


@dataclass
class _Planner:
    run: RunDirectory
    found: list[Damage]
    recorded: str

    def plan(self) -> Plan:
        if (forked_at := self.run.forked_at()) > self.resume and not self._is_over():
            lost = "; ".join(f"{one.path.relative_to(self.run.path)}: {one.problem}" for one in self.found[:3])
            raise RunConflictError(
                f"{self.run.path} is a fork at step {forked_at} and holds nothing from which it could train that step "
                f"again ({lost}); remove it and fork its parent again, `evenkeel fork PARENT NEW --at {forked_at}`"
            )
        repairs = [*self._policies(), *self._checkpoints(), *self._records(), *self._batches()]
        begin = f"from step {self.resume}" if self.resume else "from its beginning"
        return Plan(repairs, f"started again, the run goes on {begin}")

    def _is_over(self) -> bool:
        """Whether the run is finished and keeps its model: nothing has to be trained again."""
        return not self.numbers("model") and not self.numbers("finished") and self.run.is_finished()

    @cached_property
    def recipes(self) -> list[RecipeInForce]:
        return all_recipes(self.run.path)

    @cached_property
    def recipe(self) -> Recipe:
        return self.recipes[-1].recipe

    @cached_property
    def store(self) -> BatchStore:
        return BatchStore(self.run.batches)

    def numbers(self, kind: Kind) -> set[int]:
        """Of the damaged files of a kind."""
        return {damage.number for damage in self.found if damage.kind == kind}

    @cached_property
    def whole_policies(self) -> list[int]:
        folders = numbered_folders(self.run.policies) if self.run.policies.is_dir() else []
        return sorted(set(folders) - self.numbers("policy"))

    @cached_property
    def published(self) -> int:
        """The version that the run goes on with; 0 where it begins again with the model folder's."""
        found = [version for version in announced(self.run.published) if version <= self.recipe.run.steps]
        return max(found or self.whole_policies) if self.whole_policies else 0

    @cached_property
    def resume(self) -> int:
        """The step of the newest checkpoint from which the run can go on; 0: none."""
        saved = sorted(set(self.run.saved_steps()) - self.numbers("checkpoint"), reverse=True)
        return next((step for step in saved if self._why_not_from(step) is None), 0)

    def _why_not_from(self, step: int) -> str | None:
        """Why the learner cannot go on from a whole checkpoint."""
        record = self.run.control / f"{numbered(step - 1)}.json"
        controlled = recipe_of_step(self.recipes, step).controller is not None  # the step that would be trained next
        if controlled and (step - 1 in self.numbers("control") or not record.exists()):
            return f"the controller's record of step {step - 1} is gone"
        schedule = self.recipe.build_schedule()
        begun = schedule.required_version(step)
        rest = range(step, min(begun + schedule.updates_per_stage, schedule.steps))
        scored_anew = self.run.all_skipped(range(begun, step))
        if schedule.kind == "staged" and not scored_anew and not self._old_gone.isdisjoint(rest):
            return f"log-probabilities of the stage that began with step {begun} are gone"
        if (first := self._first_missing) == schedule.steps:
            return None
        required = schedule.required_version(first)
        served = not self.whole_policies or self.published in self.whole_policies
        if schedule.publishes_after(step - 1) and schedule.allows(first, step):
            return None  # the next start publishes the checkpoint's own version, which that batch may be sampled by
        if (required > self.published or not served) and step > max(self.published, required):
            return f"version {max(self.published, required)} has to be published again, before that step"
        return None

    @cached_property
    def _old_gone(self) -> set[int]:
        """Steps without whole log-probabilities from the beginning of their stage, where any are kept."""
        if not any(self.run.logprobs.glob("*-old.npy")):
            return set()
        lost = {batch.index for batch in self.store.all_lost()}
        missing = {s for s in range(self.recipe.run.steps) if not self.run.old_logprobs_path(s).exists()} - lost
        return missing | self.numbers("old_logprobs")

    @cached_property
    def _first_missing(self) -> int:
        """The first batch that has still to be collected, holes aside."""
        return max((index for index in self.store.settled() if index < self.recipe.run.steps), default=-1) + 1

    def _policies(self) -> list[Repair]:
        found = []
        for damage in self.found:
            if damage.kind == "policy":
                again = " and published again" if damage.number == self.published else ""
                found.append(self._aside(damage, f"set aside{again}"))
            elif damage.kind == "published" and self.whole_policies:
                version = damage.number if damage.number >= 0 else self.published
                text, said = f"{version}\n", f"written anew: version {version}"
                path = self.run.published / numbered(version)
                found.append(replace(self._aside(damage, said, text=text), path=path, set_aside=damage.number >= 0))
        if not self.whole_policies:
            said = "set aside: without a whole policy the model folder's is published, then the learner's"
            paths = [self.run.published / numbered(version) for version in announced(self.run.published)]
            found += [Repair(path=path, problem="no policy is whole", becomes=said) for path in paths]
        return found

    def _checkpoints(self) -> list[Repair]:
        found = [self._aside(damage, "set aside") for damage in self.found if damage.kind == "checkpoint"]
        for step in self.run.saved_steps():
            if step > self.resume and step not in self.numbers("checkpoint"):
                path = self.run.checkpoints / numbered(step)
                problem = f"whole, but {self._why_not_from(step)}"
                found.append(Repair(path=path, problem=problem, becomes="set aside"))
        return found

    def _records(self) -> list[Repair]:
        said: dict[Kind, str] = {
            "logprobs": "set aside: that step lacks it from now on, unless it is trained again",
            "mismatch": "set aside: that step lacks it from now on, unless it is trained again",
            "old_logprobs": "set aside: the stage is scored again if it is trained again",
            "control": "set aside: decided again if the step is trained again",
            "other": "set aside: it is made again",
            "record": "set aside: the run goes on without it",
            "finished": "set aside: what is left to do is found out again",
            "model": "set aside: it is exported again",
            "foreign": "set aside: it is not of this run",
        }
        found = [
            self._aside(damage, said[damage.kind].removeprefix("set aside: " if damage.is_missing else ""))
            for damage in self.found
            if damage.kind in said
        ]
        if any(damage.kind == "model" for damage in self.found):
            finished = self.run.path / "finished" / "learner"
            if finished.exists() and not any(damage.path == finished for damage in self.found):
                found.append(Repair(path=finished, problem="the model has to be exported", becomes=said["finished"]))
        found += [self._log(damage) for damage in self.found if damage.kind == "log"]
        found += [self._evaluation(damage) for damage in self.found if damage.kind == "evaluation"]
        return found

    def _log(self, damage: Damage) -> Repair:
        try:
            text = whole_lines(damage.path)
        except (OSError, ValueError):
            return self._aside(damage, "set aside: tables and reports are without its lines")
        return self._aside(damage, "written anew, without the lines that are damaged", text=text)

    def _evaluation(self, damage: Damage) -> Repair:
        noted = [event for event in read_events(self.run.path, "evaluated") if event["version"] == damage.number]
        if not noted:
            return self._aside(damage, "set aside: evaluated again if the version is served still")
        left_out = ("kind", "time", "seconds", "started")
        fields = {name: value for name, value in noted[-1].items() if name not in left_out}
        return self._aside(damage, "written anew, from the event", text=f"{json.dumps(fields)}\n")

    def _batches(self) -> list[Repair]:
        """Ascending: what is known of one rests on the one before it."""
        entries: dict[int, Entry] = {}
        gone = {damage.number: damage for damage in self.found if damage.kind in ("batch", "lost")}
        there = (index for index in self.store.settled() if index < self.recipe.run.steps)
        newest_there = max(set(there) - gone.keys(), default=-1)
        found = []
        for index in sorted(gone):
            damage = gone[index]
            if damage.kind == "batch" and (reason := self._why_lost(index)) is None:
                found.append(self._aside(damage, "set aside: the collector makes it again"))
                continue
            after = next((i for i in range(index + 1, newest_there + 1) if i not in gone), None)
            lost, entries[index] = self._lost(index, after, entries, damage)
            reason = reason if damage.kind == "batch" else "it was lost before"
            found.append(self._aside(damage, f"recorded as lost: {reason}", lost=lost))
        return found

    def _why_lost(self, index: int) -> str | None:
        if self.resume > index:
            return f"the checkpoint of step {self.resume} has learned from it"
        if self.published > index:
            return f"the engines serve version {self.published}, which has learned from it; its step is skipped"
        return None

    def _lost(
        self, index: int, after: int | None, entries: dict[int, Entry], damage: Damage
    ) -> tuple[LostBatch, Entry]:
        """The record of a batch that is lost, and its entry: what of its groups follows from the batches around it."""
        wanted = self.recipe.rollout.prompts_per_batch
        before = entries[index - 1] if index - 1 in entries else entry(self.store, index - 1)
        known: Known
        if after is None:
            reclaimed = list(before.open_groups)[:wanted]
            fresh = range(before.next_group, before.next_group + wanted - len(reclaimed))
            groups, known, next_group = (*reclaimed, *fresh), "first", before.next_group + len(fresh)
            open_groups = tuple(sorted(set(before.open_groups) - set(groups)))
        else:
            behind = entry(self.store, after)
            between, further = groups_between(before, behind), after - index - 1
            groups = tuple(between[:wanted] if further else between)
            known = "together" if further or index - 1 in entries else "all"
            next_group = behind.next_group
            open_groups = open_before(behind, set(between) - set(groups))
        lost = LostBatch(
            index=index,
            reason=damage.problem,
            recorded=self.recorded,
            learned=self.resume > index,
            groups=groups,
            known=known,
            next_group=next_group,
            open_groups=open_groups,
        )
        return lost, Entry(index=index, own=groups, next_group=next_group, open_groups=open_groups)

    def _aside(self, damage: Damage, becomes: str, *, lost: LostBatch | None = None, text: str | None = None) -> Repair:
        return Repair(
            path=damage.path,
            problem=damage.problem,
            becomes=becomes,
            set_aside=not damage.is_missing,
            lost=lost,
            text=text,
        )

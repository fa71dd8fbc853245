"""Read a run from its logs: steps and their cost, evaluations, trouble. Needs no torch.

The cost of a step comes from

    metrics       its tokens, its seconds, and the time of its end
    committed     the samples of its batch; the batch's file where a killed collector left no such event
    skipped/      its batch was lost by damage: it cost nothing, and the next version keeps the weights of this one
    recipes       the number of accelerators: a later start may have another layout
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from sys import intern
from typing import Any

from pipeline.config.recipe import Recipe
from pipeline.data.event_log import read_events, read_metrics
from pipeline.data.run_directory import RunDirectory, numbered_files
from pipeline.data.run_recipes import RecipeInForce, all_recipes, recipe_of_step
from pipeline.data.store import BatchStore
from pipeline.errors import StoreError
from pipeline.gpu_needs import GpuNeeds
from precision.mismatch.alarms import FRESH

SFT_FILE = "sft.json"
"""File of a run of `evenkeel sft` that names the data it is trained on."""
MOST_DETAILED = 4000
"""Most steps whose groups of numbers, such as `mismatch`, a RunLog holds: more than a figure can show."""
_NEWEST = 50
"""Newest steps whose groups of numbers a RunLog always holds."""
_ROUTINE = ("issued", "sampled", "consumed")
"""Event kinds that come with every step and that no report reads."""


@dataclass(kw_only=True)
class RunLog:
    """The logs of a run. `metrics` holds one mapping a step, sorted; `events` are in the order of writing. In a long
    run only about MOST_DETAILED steps have groups (`mismatch`, histograms), but for `seconds` and the values that
    alarms read."""

    run_dir: Path
    recipes: list[RecipeInForce]
    """Every recipe that the run went by, in order: a fork, or a run that was changed, has several."""
    metrics: list[dict[str, Any]]
    events: list[dict[str, Any]]
    damage: tuple[str, ...] = ()
    """A sentence for each log in which damaged lines were skipped."""
    skipped: list[int] = field(init=False)
    """Steps skipped because their batch was lost by damage, ascending."""
    num_steps: int = field(init=False)
    """Steps trained or skipped so far."""
    _by_kind: dict[str, list[dict[str, Any]]] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self.skipped = RunDirectory(self.run_dir).skipped_steps()
        newest = [int(line["step"]) for line in self.metrics[-1:]]
        self.num_steps = 1 + max([*newest, *self.skipped[-1:]], default=-1)
        self._by_kind = {}
        for event in self.events:
            self._by_kind.setdefault(event["kind"], []).append(event)

    @staticmethod
    def read(run_dir: Path) -> RunLog:
        """Read a run, finished or not. Raises StoreError when `run_dir` is not a run directory."""
        recipes, damage = recipes_of(run_dir), list[str]()
        metrics = read_metrics(run_dir, damage, prepare=_Thinned())

        def prepare(event: dict[str, Any]) -> dict[str, Any]:
            if event["kind"] in _ROUTINE:
                return dict(kind=intern(event["kind"]), time=event["time"])
            return {intern(key): value for key, value in event.items() if key != "measured"}

        events = read_events(run_dir, damage=damage, prepare=prepare)
        return RunLog(run_dir=run_dir, recipes=recipes, metrics=metrics, events=events, damage=tuple(damage))

    @property
    def recipe(self) -> Recipe:
        """The recipe that the run goes by now."""
        return self.recipes[-1].recipe

    def series(self, key: str) -> tuple[list[int], list[float]]:
        """Return the steps and the finite values of one metric. The key `a/b` means b in the group a."""
        group, _, name = key.rpartition("/")
        steps, values = list[int](), list[float]()
        for line in self.metrics:
            within = _within(line, key) if group else line
            if name in within and (value := number(within, name)) is not None:
                steps.append(line["step"])
                values.append(value)
        return steps, values

    def last(self, key: str) -> float | None:
        """Return the newest finite value of one metric, or None."""
        values = self.series(key)[1]
        return values[-1] if values else None

    def of_kind(self, *kinds: str) -> list[dict[str, Any]]:
        if len(kinds) == 1:
            return list(self._by_kind.get(kinds[0], ()))
        return [event for event in self.events if event["kind"] in kinds]

    @property
    def evaluations(self) -> list[dict[str, Any]]:
        """`evaluated` events by the version that answered; the later event where an evaluation was made twice."""
        by_due = {int(event.get("due", event["version"])): event for event in self.of_kind("evaluated")}
        return sorted(by_due.values(), key=lambda event: int(event["version"]))

    @property
    def wall_s(self) -> float:
        """Seconds from the first log line to the last, without pauses. A pause is the gap before a `started` or
        `recipe_changed` event that does not follow a start, a change or a restart."""
        lines = sorted((float(line["time"]), str(line.get("kind", ""))) for line in (*self.events, *self.metrics))
        begins, within = ("started", "recipe_changed"), ("started", "recipe_changed", "restarted")
        return sum(
            time - before for (before, was), (time, kind) in pairwise(lines) if kind not in begins or was in within
        )


def recipes_of(run_dir: Path) -> list[RecipeInForce]:
    """Return every recipe that a run went by, in order. Raises StoreError when `run_dir` is not a run directory."""
    if not run_dir.is_dir():
        what = "is no folder" if run_dir.exists() else "does not exist"
        raise StoreError(f"{run_dir} {what}; give the folder of a run, for example runs/NAME")
    return all_recipes(run_dir)


COMPUTE_AXES = ("samples", "tokens", "hours")
"""Measures of a run's compute: samples trained on, response tokens trained on, accelerator-hours of its steps."""


@dataclass(frozen=True, kw_only=True)
class Step:
    """The cost of one step, trained or skipped. A value that no file holds is None."""

    samples: int | None
    tokens: float | None
    """Response tokens."""
    hours: float | None
    """Accelerator-hours over all phases of the step, waiting included; start-up and pauses are not. Counts the
    accelerators of learner, engines and a started teacher, where learner and engines share them (weights.channel ipc)
    once. On a CPU machine each process counts as one."""
    ended: float | None
    """Seconds since 1970."""


def steps_of(run_log: RunLog) -> list[Step]:
    lines = {int(line["step"]): line for line in run_log.metrics}
    samples = samples_of_batches(run_log)
    skipped_at = {int(event["step"]): float(event["time"]) for event in run_log.of_kind("skipped")}
    skipped, steps = set(run_log.skipped), list[Step]()
    for step in range(run_log.num_steps):
        line = lines.get(step)
        if step in skipped:
            steps.append(Step(samples=0, tokens=0.0, hours=0.0, ended=skipped_at.get(step)))
        elif line is None:
            steps.append(Step(samples=samples.get(step), tokens=None, hours=None, ended=None))
        else:
            hours, recipe = None, recipe_of_step(run_log.recipes, step)
            if "seconds" in line:  # engines that the run did not start (rollout.urls) count, too
                gpus = replace(GpuNeeds.of(recipe), engines=recipe.rollout.engines).total
                hours = gpus * sum(map(float, line["seconds"].values())) / 3600.0
            tokens, ended = number(line, "num_tokens"), float(line["time"])
            steps.append(Step(samples=samples.get(step), tokens=tokens, hours=hours, ended=ended))
    return steps


def spent_by_version(steps: Sequence[Step], x: str) -> list[float]:
    """Return the compute spent up to each version, [versions], in one of COMPUTE_AXES. Version 0 cost nothing; the list
    ends before the first step of unknown cost."""
    spent = [0.0]
    for step in steps:
        if (cost := getattr(step, x)) is None:
            break
        spent.append(spent[-1] + float(cost))
    return spent


def samples_of_batches(run_log: RunLog) -> dict[int, int]:
    """Return batch → number of samples, for every committed batch that has an event or a readable file."""
    found = {int(event["batch"]): int(event["samples"]) for event in run_log.of_kind("committed")}
    batches = RunDirectory(run_log.run_dir).batches
    if untold := numbered_files(batches, ".zarr.zip").keys() - found.keys():
        store = BatchStore(batches)
        for index in untold:
            with suppress(StoreError):
                found[index] = store.num_samples(index)
    return found


@dataclass
class _Thinned:
    """A filter for the lines of a long run: groups of numbers stay at every k-th step and at the newest steps."""

    every: int = 1
    detailed: list[dict[str, Any]] = field(default_factory=list)
    newest: deque[dict[str, Any]] = field(default_factory=deque)

    def __call__(self, line: dict[str, Any]) -> dict[str, Any]:
        line = {intern(key): value for key, value in line.items()}  # lines share the texts of their keys
        self.newest.append(line)
        if len(self.newest) > _NEWEST:
            self._settle(self.newest.popleft())
        if len(self.detailed) > MOST_DETAILED:
            self.every *= 2
            before, self.detailed = self.detailed, []
            for earlier in before:
                self._settle(earlier)
        return line

    def _settle(self, line: dict[str, Any]) -> None:
        if line["step"] % self.every == 0:
            self.detailed.append(line)
            return
        fresh = _within(line, "/".join((*FRESH, "")))
        for key in [key for key, value in line.items() if isinstance(value, dict | list) and key != "seconds"]:
            del line[key]
        if fresh:
            line[FRESH[0]] = {FRESH[1]: {FRESH[2]: fresh}}


def _within(line: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """Return the mapping that holds the last part of a key, or an empty mapping."""
    for part in key.split("/")[:-1]:
        line = line[part] if isinstance(line.get(part), Mapping) else {}
    return line


def number(line: Mapping[str, Any], key: str) -> float | None:
    """Return a finite number, or None."""
    value = line.get(key)
    if type(value) is float:  # as nearly all are
        return value if math.isfinite(value) else None
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value)


def numbers(line: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, float]]:
    """Yield the finite numbers of a log line, at any depth, by name: `seconds/update`."""
    for name, value in line.items():
        if isinstance(value, Mapping):
            yield from numbers(value, f"{above}{name}/")
        elif (found := number(line, name)) is not None:
            yield f"{above}{name}", found

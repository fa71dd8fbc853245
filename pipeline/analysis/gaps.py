"""Which steps and versions of a run lack a record that they should have left.

metrics, consumed, logprobs, mismatch, control
                                         of each step that a checkpoint holds; they are written before it
checkpoints                              the newest that was saved
evaluations                              of each version that was due before a batch that is committed

Which were due, and whether a controller left a record, says the recipe that the batch was sampled by, or the step
trained by: a fork may have another schedule and another controller than the run that it comes from.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

from pipeline.data.event_log import read_events, read_metrics
from pipeline.data.run_directory import RunDirectory
from pipeline.data.run_recipes import RecipeInForce, all_recipes, recipe_of_batch, recipe_of_step
from pipeline.data.store import BatchStore


@dataclass(frozen=True, kw_only=True)
class Gaps:
    """Steps, or versions, by what they lack; ascending. What a repair set aside is no gap: its record says so."""

    metrics: tuple[int, ...]
    consumed: tuple[int, ...]
    """Steps without the event."""
    logprobs: tuple[int, ...]
    mismatch: tuple[int, ...]
    control: tuple[int, ...]
    checkpoints: tuple[int, ...]
    evaluations: tuple[int, ...]
    """Versions without the file or without the event that reports are drawn from."""

    @property
    def none(self) -> bool:
        return not any(getattr(self, field.name) for field in fields(self))


def find_gaps(run: RunDirectory, repaired: Iterable[str]) -> Gaps:
    """`repaired` names files, relative to the run, that a repair has set aside."""
    known, recipes = set(repaired), all_recipes(run.path)
    finished = run.path / "finished"
    steps = recipes[-1].recipe.run.steps if (finished / "learner").exists() else max(run.saved_steps(), default=0)
    trained = sorted(set(range(steps)) - set(run.skipped_steps()))

    def without(folder: Path, suffix: str, numbers: Iterable[int]) -> tuple[int, ...]:
        there = {path.name for path in folder.glob(f"*{suffix}")}
        there |= {Path(name).name for name in known if Path(name).parent.name == folder.name}
        return tuple(number for number in numbers if f"{number:06d}{suffix}" not in there)

    # Logs from which a repair has taken lines: what they do not hold any more is known.
    cut = {Path(name).parent.name for name in known if name.endswith(".jsonl")}
    noted = {int(line["step"]) for line in read_metrics(run.path)}
    consumed = {int(event["step"]) for event in read_events(run.path, "consumed")}
    saved = [int(event["step"]) for event in read_events(run.path, "saved")]
    newest = max([*saved, *([steps] if (finished / "learner").exists() else [])], default=0)
    gone = newest > max(run.saved_steps(), default=0) and f"checkpoints/{newest:06d}" not in known
    measures = any(run.mismatch.glob("*.zarr.zip"))
    controlled = [step for step in trained if recipe_of_step(recipes, step).controller is not None]
    due = _due(run, recipes)
    evaluated = {int(event["version"]) for event in read_events(run.path, "evaluated")}
    return Gaps(
        metrics=() if "metrics" in cut else tuple(step for step in trained if step not in noted),
        consumed=() if "events" in cut else tuple(step for step in trained if step not in consumed),
        logprobs=without(run.logprobs, ".npy", trained),
        mismatch=without(run.mismatch, ".zarr.zip", trained) if measures else (),
        control=without(run.control, ".json", controlled),
        checkpoints=(newest,) if gone else (),
        evaluations=tuple(sorted({*without(run.evaluations, ".json", due), *(set(due) - evaluated)})),
    )


def _due(run: RunDirectory, recipes: Sequence[RecipeInForce]) -> list[int]:
    """Versions that must have been evaluated by now: before their batch was committed, or the collector ended."""
    due = set()
    for index in range(BatchStore(run.batches).next_index):
        recipe = recipe_of_batch(recipes, index)
        if index % recipe.evaluation.every == 0:
            due.add(recipe.build_schedule().published_before(index))
    if (run.path / "finished" / "collector").exists():
        due.add(recipes[-1].recipe.run.steps)
    return sorted(due)

"""The alarms of a whole run: since when, until when, how bad."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from pipeline.analysis.run_log import RunLog
from pipeline.config.recipe import Recipe
from precision.mismatch.alarms import Alarm, alarms


@dataclass(frozen=True, kw_only=True)
class AlarmHistory:
    """All steps of a run that broke one rule."""

    worst: Alarm
    """Where the statistic was furthest beyond its bound."""
    first_step: int
    last_step: int
    num_steps: int
    """Steps that broke it, of those between the two."""
    lasts: bool
    """Whether the newest step broke it."""

    @property
    def text(self) -> str:
        """One line: `ess low: 0.12 at worst, below 0.3, at 2 of steps 3 to 7, until now`."""
        beyond = f"{self.worst.value_text} at worst, {self.worst.rule.wrong} {self.worst.bound:g}"
        return f"{self.name}: {beyond}, at {self.steps}"

    @property
    def name(self) -> str:
        return self.worst.rule.name.replace("_", " ")

    @property
    def steps(self) -> str:
        """`step 3`, or `2 of steps 3 to 7, until now`."""
        first, last = self.first_step, self.last_step
        steps = f"step {first}" if first == last else f"{self.num_steps} of steps {first} to {last}"
        return f"{steps}, until now" if self.lasts else steps


def formats_differ(recipe: Recipe) -> bool:
    """Whether the learner computes in another quantized format than the engines, or only one side in any: the bounds of
    some alarms depend on it."""
    learner, sampled = recipe.learner, recipe.rollout.quantized_format
    trained = sampled if learner.fp8_emulation else learner.precision if learner.precision.startswith("fp8") else None
    return trained != sampled


def formats_differ_at(run_log: RunLog) -> Callable[[int], bool]:
    """Return `formats_differ` of a step, by the recipe that it was trained by."""
    known = [(one.first_step, formats_differ(one.recipe)) for one in run_log.recipes]
    return lambda step: [differ for first, differ in known if first <= step][-1]


def alarm_history(run_log: RunLog) -> list[AlarmHistory]:
    """One entry for each rule that any step broke, those that last first, then the newest."""
    by_rule: dict[str, list[tuple[int, Alarm]]] = {}
    differ = formats_differ_at(run_log)
    for line in run_log.metrics:
        step = int(line["step"])
        for alarm in alarms(line, quantized=differ(step)):
            by_rule.setdefault(alarm.rule.name, []).append((step, alarm))
    found = [_history(steps, run_log.num_steps - 1) for steps in by_rule.values()]
    return sorted(found, key=lambda history: (not history.lasts, -history.last_step, -history.num_steps))


def _history(steps: list[tuple[int, Alarm]], newest: int) -> AlarmHistory:
    sign = 1.0 if steps[0][1].rule.wrong == "above" else -1.0
    return AlarmHistory(
        worst=max((alarm for _, alarm in steps), key=lambda alarm: sign * (alarm.value - alarm.bound)),
        first_step=steps[0][0],
        last_step=steps[-1][0],
        num_steps=len(steps),
        lasts=steps[-1][0] == newest,
    )

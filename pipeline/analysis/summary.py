"""The numbers of a run that fit in a table: what `evenkeel runs show` prints and the report opens with."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

from pipeline.advantages.methods import Advantage
from pipeline.analysis.alarm_history import alarm_history
from pipeline.analysis.flight.bottleneck import bottleneck, newest_shares
from pipeline.analysis.run_log import RunLog, number
from pipeline.analysis.steps import samples_of_batches, step_seconds
from pipeline.config.recipe import Recipe, advice, layout_name
from precision.corrections import Correction
from precision.objectives.base import Objective

PROMPT_COUNTS = ("refills", "zero_variance", "filtered", "solved_groups", "interrupted")
"""Of the collector's `committed` events: groups asked in place of others, groups dropped for equal rewards, groups not
asked because their problem was solved, samples that were told to end."""


def summary(run_dir: Path) -> dict[str, Any]:
    """Headline numbers of one run; a number that is not known yet is None. Raises StoreError (no run directory).

    `wall_s` runs from the first line of the logs to the last without pauses between two starts, `tokens` counts trained
    response tokens. `tokens_per_s` is of the seconds of the steps: without start-up and pauses.
    """
    return summarize(RunLog.read(run_dir))


def summarize(run_log: RunLog) -> dict[str, Any]:
    """As `summary`, of a RunLog that is already in memory."""
    recipe = run_log.recipe
    tokens = sum(run_log.series("num_tokens")[1])
    committed, samples = run_log.of_kind("committed"), sum(samples_of_batches(run_log).values())
    return dict(
        name=recipe.run.name,
        state=_state(run_log),
        steps=run_log.num_steps,
        steps_planned=recipe.run.steps,
        **_held_out(run_log),
        wall_s=run_log.wall_s,
        samples=samples,
        tokens=int(tokens),
        sft=_sft(run_log) if run_log.is_sft else None,
        tokens_per_s=_tokens_per_s(run_log),
        learner_layout=layout_name(recipe.learner).replace("one", "one process"),
        learner_precision=recipe.learner.precision + (", FP8 emulated" if recipe.learner.fp8_emulation else ""),
        engines=f"{recipe.rollout.engines} × TP{recipe.rollout.tensor_parallel}",
        rollout_precision=recipe.rollout.precision,
        objective=describe_choice(recipe.objective),
        correction=describe_choice(recipe.correction),
        advantage=describe_choice(recipe.advantage),
        schedule=describe_schedule(recipe),
        reward_last=run_log.last("reward_mean"),
        ess_last=run_log.last("ess"),
        ess_min=min(run_log.series("ess")[1], default=None),
        k3_kl_last=run_log.last("k3_kl"),
        entropy_last=run_log.last("entropy"),
        lag_max=max(run_log.series("lag_max")[1], default=None),
        restarts=len(run_log.of_kind("restarted")),
        dropped=sum(int(event.get("dropped", 0)) for event in committed),
        **{key: sum(int(event.get(key, 0)) for event in committed) for key in PROMPT_COUNTS},
        verifier_failures=int(sum(run_log.series("verifier_failures")[1])),
        bottleneck=bottleneck(newest_shares(run_log)),
        teacher_failures=int(sum(run_log.series("teacher_failures")[1])),
        warnings=[
            *run_log.damage,
            *advice(recipe),
            *_changed_reward(run_log),
            *_failed_rewards(run_log, samples),
            *_unsolved(run_log),
            *_failed_teacher(run_log, samples),
        ],
        alarms=[history.text for history in alarm_history(run_log)],
    )


def _sft(run_log: RunLog) -> dict[str, float | None]:
    """First and last loss, on what is learned and held out, and the last learning rate."""
    found = {"lr_last": run_log.last("lr")}
    for name in ("loss", "held_out_loss"):
        values = run_log.series(name)[1]
        found |= {f"{name}_first": values[0] if values else None, f"{name}_last": values[-1] if values else None}
    return found


def _tokens_per_s(run_log: RunLog) -> float | None:
    """Of the steps whose seconds are known."""
    timed = [line for line in run_log.metrics if line.get("seconds")]
    seconds = sum(map(step_seconds, timed))
    return sum(number(line, "num_tokens") or 0.0 for line in timed) / seconds if seconds > 0 else None


def _failed_rewards(run_log: RunLog, samples: int) -> list[str]:
    """How many of `samples` have no reward, and why the first has none, in one sentence; none where all have one."""
    told = run_log.of_kind("reward_failed")
    failed = sum(run_log.series("verifier_failures")[1])
    if not told and not failed:
        return []
    if not failed:
        return [
            f"a sample that is not trained on, such as a held-out one, had no reward, since its verifier failed, "
            f"{told[0]['reason']}: {told[0]['detail']}"
        ]
    first = f"; the first, {told[0]['reason']}: {told[0]['detail']}" if told else ""
    return [f"{failed:.0f} of {samples} samples had no reward, since their verifier failed{first}"]


def _unsolved(run_log: RunLog) -> list[str]:
    """What the collector said of rewards that are all too low, unless a later sample was solved."""
    told = run_log.of_kind("unsolved")
    return [unsolved_line(told[0])] if told and not any(run_log.series("solve_rate")[1]) else []


def unsolved_line(event: Mapping[str, Any]) -> str:
    """The event `unsolved` as one sentence."""
    return (
        f"no sample of {event['batches']} batches reached reward.solved_at {event['solved_at']:g}, the highest reward "
        f"was {event['highest']:g}: pass rates stay 0, and so do advantages that ask what is solved; set "
        "reward.solved_at to what your reward gives where a problem is solved, or ask easier prompts"
    )


def _failed_teacher(run_log: RunLog, samples: int) -> list[str]:
    """How many of `samples` the teacher did not score, and why, in one sentence; none where it scored all."""
    told = run_log.of_kind("teacher_failed")
    failed = sum(run_log.series("teacher_failures")[1])
    if not told and not failed:
        return []
    first = f"; the first, {told[0]['reason']}: {told[0]['detail']}" if told else ""
    return [f"{failed:.0f} of {samples} samples were not scored by the teacher and left out of the loss{first}"]


def describe_choice(section: Objective | Correction | Advantage) -> str:
    """Its name, with the keys that are not left at their defaults: `clipped (clip_high 0.28)`."""
    chosen = section.model_dump(mode="json", exclude={"name"}, exclude_defaults=True)
    options = ", ".join(key if value is True else f"{key} {value}" for key, value in chosen.items())
    return f"{section.name} ({options})" if options else section.name


def describe_schedule(recipe: Recipe) -> str:
    """The schedule with its one number, and the updates of a batch where there are several."""
    updates = recipe.learner.updates_per_batch
    return f"{recipe.build_schedule()}" + (f", {updates} updates a batch" if updates > 1 else "")


def _held_out(run_log: RunLog) -> dict[str, Any]:
    """First and last evaluation by the reward that the run has now: pass@1 with its interval, pass@k of the largest k
    that both measured, and rewards."""
    since, evaluations = _reward_since(run_log), run_log.evaluations
    evaluations = [event for event in evaluations if int(event["version"]) >= since] or evaluations[-1:]
    first, last = (evaluations[0], evaluations[-1]) if evaluations else ({}, {})
    measured = [{int(k) for k in event["pass_at_k"]} for event in (first, last) if event.get("pass_at_k")]
    k = max(set[int]().union(*measured).intersection(*measured), default=None)
    values: dict[str, Any] = dict(k=k)
    for which, event in (("first", first), ("last", last)):
        values |= {
            f"version_{which}": event.get("version"),
            f"pass_at_1_{which}": number(event, "pass_at_1"),
            f"pass_at_1_{which}_low": number(event, "pass_at_1_low"),
            f"pass_at_1_{which}_high": number(event, "pass_at_1_high"),
            f"pass_at_k_{which}": number(event.get("pass_at_k") or {}, str(k)),
            f"held_out_reward_{which}": number(event, "reward_mean"),
            f"held_out_parts_{which}": dict(event.get("reward_parts") or {}),
            f"held_out_failures_{which}": int(number(event, "verifier_failures") or 0),
        }
    return values


def _reward_since(run_log: RunLog) -> int:
    """The step since which the run has the reward that it has now: scores before it are of another."""
    changed = [int(event["step"]) for event in run_log.of_kind("files_changed") if event["what"] == "reward"]
    for before, after in pairwise(run_log.recipes):
        if rewards_of(before.recipe) != rewards_of(after.recipe):
            changed.append(after.first_step)
    return max(changed, default=0)


def rewards_of(recipe: Recipe) -> list[Any]:
    """What of a recipe says how an answer is judged."""
    task = recipe.task.model_dump(mode="json")
    return [task.get("reward"), [source.get("reward") for source in task.get("sources") or ()]]


def _changed_reward(run_log: RunLog) -> list[str]:
    since = _reward_since(run_log)
    if not since:
        return []
    return [
        f"the reward was changed at step {since}: scores before it are of another reward, and not compared with later"
    ]


def _state(run_log: RunLog) -> str:
    if not run_log.events and not run_log.metrics:
        return "not started"
    if run_log.is_complete:
        return "finished"
    return f"unfinished: {run_log.num_steps} of {run_log.recipe.run.steps} steps"

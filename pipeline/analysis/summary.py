"""Summarize a run: the numbers of `evenkeel runs show` and of the head of the report, alarms, and the bottleneck.

The learner's phases of a step follow one another and cover it. So the share of `wait` is the share of time in which
batches come too slowly, and the other shares say what makes the learner slow. A wait ends when its batch is committed,
so the phases of the awaited batch say why it came late.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from pipeline.advantages.methods import Advantage
from pipeline.analysis.run_log import SFT_FILE, RunLog, number, samples_of_batches
from pipeline.config.recipe import Recipe, advice, layout_name
from pipeline.errors import EvenKeelError, StoreError
from precision.corrections import Correction
from precision.mismatch.alarms import Alarm, alarms
from precision.objectives.objective import Objective

PROMPT_COUNTS = ("refills", "zero_variance", "filtered", "solved_groups", "interrupted")
"""Counts in `committed` events: groups asked in place of others, groups dropped for equal rewards, groups that the
user's filter dropped, groups not asked because their problem was solved, and interrupted samples."""


def summary(run_dir: Path) -> dict[str, Any]:
    """Return the headline numbers of one run; unknown numbers are None. Raises StoreError.

    `wall_s` is the time of the logs without pauses between two starts, `tokens` counts trained response tokens, and
    `tokens_per_s` divides them by the seconds of the steps.
    """
    return summarize(RunLog.read(run_dir))


def list_runs(folder: Path) -> list[dict[str, Any]]:
    """Return the summary and the `path` of each run directory in `folder`, by name; an unreadable run has `error`
    instead of a summary. Raises StoreError when `folder` is no folder."""
    if not folder.is_dir():
        raise StoreError(f"{folder} is no folder; give the one that holds runs, for example runs")
    found = []
    for path in sorted(path for path in folder.iterdir() if os.path.lexists(path / "recipe.yaml")):
        try:
            found.append(dict(path=str(path)) | summary(path))
        except EvenKeelError as error:
            found.append(dict(path=str(path), error=str(error)))
    return found


def summarize(run_log: RunLog, histories: Sequence[AlarmHistory] | None = None) -> dict[str, Any]:
    """Return the `summary` of a RunLog; `histories` is its alarm_history, if already known."""
    recipe = run_log.recipe
    if histories is None:
        histories = alarm_history(run_log)
    tokens = sum(run_log.series("num_tokens")[1])
    committed, samples = run_log.of_kind("committed"), sum(samples_of_batches(run_log).values())
    timed = [line for line in run_log.metrics if line.get("seconds")]
    seconds = sum(float(spent) for line in timed for spent in line["seconds"].values())
    # Scores from before a change of the reward cannot be compared with later ones.
    changed = [int(event["step"]) for event in run_log.of_kind("files_changed") if event["what"] == "reward"]
    for before, after in pairwise(run_log.recipes):
        tasks = [one.recipe.task.model_dump(mode="json") for one in (before, after)]
        judged = [[task.get("reward"), *(part.get("reward") for part in task.get("sources") or ())] for task in tasks]
        changed += [after.first_step] if judged[0] != judged[1] else []
    since = max(changed, default=0)
    state = f"unfinished: {run_log.num_steps} of {recipe.run.steps} steps"
    if run_log.num_steps >= recipe.run.steps:
        state = "finished"
    elif not (run_log.events or run_log.metrics):
        state = "not started"
    sft: dict[str, float | None] | None = None
    if (run_log.run_dir / SFT_FILE).exists():
        sft = {"lr_last": run_log.last("lr")}
        for name in ("loss", "held_out_loss"):
            values = run_log.series(name)[1]
            sft |= {f"{name}_first": values[0] if values else None, f"{name}_last": values[-1] if values else None}
    updates = recipe.learner.updates_per_batch
    return dict(
        name=recipe.run.name,
        state=state,
        steps=run_log.num_steps,
        steps_planned=recipe.run.steps,
        **_held_out(run_log, since),
        wall_s=run_log.wall_s,
        samples=samples,
        tokens=int(tokens),
        sft=sft,
        tokens_per_s=sum(number(line, "num_tokens") or 0.0 for line in timed) / seconds if seconds > 0 else None,
        learner_layout=layout_name(recipe.learner).replace("one", "one process"),
        learner_precision=recipe.learner.precision + (", FP8 emulated" if recipe.learner.fp8_emulation else ""),
        engines=f"{recipe.rollout.engines} × TP{recipe.rollout.tensor_parallel}",
        rollout_precision=recipe.rollout.precision,
        objective=describe_choice(recipe.objective),
        correction=describe_choice(recipe.correction),
        advantage=describe_choice(recipe.advantage),
        schedule=f"{recipe.build_schedule()}" + (f", {updates} updates a batch" if updates > 1 else ""),
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
        warnings=_warnings(run_log, samples, since),
        alarms=[f"{one.name}: {one.beyond}, at {one.steps}" for one in histories],
    )


def _warnings(run_log: RunLog, samples: int, since: int) -> list[str]:
    """Return a sentence for each problem of the logs, the recipe and the rewards of a run of `samples` samples, whose
    reward has not changed since step `since`."""
    found = [*run_log.damage, *advice(run_log.recipe)]
    if since:
        found.append(
            f"the reward was changed at step {since}: scores before it are of another reward, and not compared with "
            "later"
        )
    reward, unsolved, teacher = (run_log.of_kind(k)[:1] for k in ("reward_failed", "unsolved", "teacher_failed"))
    firsts = [f"{event['reason']}: {event['detail']}" for event in reward]
    if failed := sum(run_log.series("verifier_failures")[1]):
        first = "".join(f"; the first, {text}" for text in firsts)
        found.append(f"{failed:.0f} of {samples} samples had no reward, since their verifier failed{first}")
    else:
        what = "a sample that is not trained on, such as a held-out one, had no reward, since its verifier failed"
        found += [f"{what}, {text}" for text in firsts]
    if not any(run_log.series("solve_rate")[1]):  # else a later sample was solved
        found += map(unsolved_line, unsolved)
    failed = sum(run_log.series("teacher_failures")[1])
    if teacher or failed:
        first = "".join(f"; the first, {event['reason']}: {event['detail']}" for event in teacher)
        found.append(
            f"{failed:.0f} of {samples} samples were not scored by the teacher and left out of the loss{first}"
        )
    if failed_episodes := run_log.of_kind("episode_failed"):
        given_up = len({event["group"] for event in failed_episodes if not event["again"]})
        found.append(
            f"{len(failed_episodes)} episodes failed in their environment or agent, and {given_up} groups were given "
            f"up; the first, {failed_episodes[0]['reason']}"
        )
    return found


def unsolved_line(event: Mapping[str, Any]) -> str:
    return (
        f"no sample of {event['batches']} batches reached reward.solved_at {event['solved_at']:g}, the highest reward "
        f"was {event['highest']:g}: pass rates stay 0, and so do advantages that ask what is solved; set "
        "reward.solved_at to what your reward gives where a problem is solved, or ask easier prompts"
    )


def describe_choice(section: Objective | Correction | Advantage) -> str:
    """Return the name of a choice, with the keys that differ from their defaults: `clipped (clip_high 0.28)`."""
    chosen = section.model_dump(mode="json", exclude={"name"}, exclude_defaults=True)
    options = ", ".join(key if value is True else f"{key} {value}" for key, value in chosen.items())
    return f"{section.name} ({options})" if options else section.name


def _held_out(run_log: RunLog, since: int) -> dict[str, Any]:
    """Return held-out scores of the first and the last evaluation from version `since` on, at a common k."""
    evaluations = run_log.evaluations
    evaluations = [event for event in evaluations if int(event["version"]) >= since] or evaluations[-1:]
    first, last = (evaluations[0], evaluations[-1]) if evaluations else ({}, {})
    measured = [
        {int(k) for k in event["pass_at_k"] if k.isdecimal()} for event in (first, last) if event.get("pass_at_k")
    ]
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


@dataclass(frozen=True, kw_only=True)
class AlarmHistory:
    """All steps of a run that broke the same rule."""

    worst: Alarm
    """The alarm furthest beyond its bound."""
    first_step: int
    last_step: int
    num_steps: int
    """Steps that broke the rule, between the two."""
    lasts: bool

    name: str
    steps: str
    """`step 3`, or `2 of steps 3 to 7, until now`."""
    beyond: str
    """`0.12 at worst, below 0.3`."""


def formats_differ(recipe: Recipe) -> bool:
    """Return whether learner and engines differ in their quantized format. The bounds of some alarms depend on it."""
    learner, sampled = recipe.learner, recipe.rollout.quantized_format
    trained = sampled if learner.fp8_emulation else learner.precision if learner.precision.startswith("fp8") else None
    return trained != sampled


def alarm_history(run_log: RunLog) -> list[AlarmHistory]:
    """Return an entry for each rule that any step broke: first the rules that are still broken, then the newest."""
    by_rule: dict[str, list[tuple[int, Alarm]]] = {}
    differs = [(one.first_step, formats_differ(one.recipe)) for one in run_log.recipes]
    for line in run_log.metrics:
        step = int(line["step"])
        quantized = [differ for first, differ in differs if first <= step][-1]
        for alarm in alarms(line, quantized=quantized):
            by_rule.setdefault(alarm.rule.name, []).append((step, alarm))
    found = []
    for steps in by_rule.values():
        (first, alarm), (last, _) = steps[0], steps[-1]
        sign, lasts = 1.0 if alarm.rule.wrong == "above" else -1.0, last == run_log.num_steps - 1
        worst = max((broken for _, broken in steps), key=lambda one: sign * (one.value - one.bound))
        when = f"step {first}" if first == last else f"{len(steps)} of steps {first} to {last}"
        found.append(
            AlarmHistory(
                worst=worst,
                first_step=first,
                last_step=last,
                num_steps=len(steps),
                lasts=lasts,
                name=alarm.rule.name.replace("_", " "),
                steps=f"{when}, until now" if lasts else when,
                beyond=f"{worst.value_text} at worst, {worst.rule.wrong} {worst.bound:g}",
            )
        )
    return sorted(found, key=lambda history: (not history.lasts, -history.last_step, -history.num_steps))


LEARNER_PHASES = ("wait", "logprobs", "update", "publish", "record", "save")
"""In order within a step."""
COLLECTOR_PHASES = ("generate", "hold", "evaluate", "commit")
"""In order. `hold` waits until the batch before it is committed; `evaluate`, where a commit waits for it."""
WINDOW_STEPS = 20
"""Steps that judge the bottleneck, plus some to whole stages: they hold a checkpoint and follow a change."""
CLOSE = 0.1
"""A second group whose share is this near the first is named too, as the next bottleneck."""
_ADVICE = {
    "rollouts": "the learner waits {share} of each step; add engines or allow lag",
    "evaluations": "the learner waits {share} of each step for held-out answers; raise evaluation.every",
    "committing": "the learner waits {share} of each step until its batch is written; look at the run's disk",
    "learner": "scoring and updating take {share} of each step; add data-parallel ranks or larger micro-batches",
    "publishing": "moving weights takes {share} of each step; publish less often (schedule staged)",
    "records": "writing log-probabilities and statistics takes {share} of each step; look at the run's disk",
    "checkpoints": "saving takes {share} of the time; raise checkpoint.every",
}


def whole_stages(window: int, stage: int) -> int:
    """Return the number of steps in as many stages as hold `window` steps. The learner waits for a whole stage at its
    beginning, so the steps within it say nothing about rollouts."""
    return -(-window // stage) * stage


def judged_lines(
    metrics: Iterable[Mapping[str, Any]], *, window: int = WINDOW_STEPS, stage: int = 1
) -> list[Mapping[str, Any]]:
    """Return the timed lines among the last `window` steps, up to whole stages of `stage` steps. The first line is left
    out once there is a stage without it: set-up makes a run's first step slow."""
    timed = [line for line in metrics if line.get("seconds")]
    usual = timed[1:] if len(timed) > stage else timed
    whole = max(stage, len(usual) // stage * stage)
    return usual[-min(whole, whole_stages(window, stage)) :]


def phase_shares(
    metrics: Iterable[Mapping[str, Any]], *, window: int = WINDOW_STEPS, stage: int = 1
) -> dict[str, float]:
    """Return the share (0 to 1) of each learner phase in the judged steps; empty when nothing was timed."""
    judged = judged_lines(metrics, window=window, stage=stage)
    seconds = {phase: sum(number(line["seconds"], phase) or 0.0 for line in judged) for phase in LEARNER_PHASES}
    total = sum(seconds.values())
    return {phase: spent / total for phase, spent in seconds.items()} if total > 0 else {}


def time_shares(
    metrics: Sequence[Mapping[str, Any]],
    committed: Iterable[Mapping[str, Any]] = (),
    *,
    window: int = WINDOW_STEPS,
    stage: int = 1,
) -> dict[str, float]:
    """Return `phase_shares` with the waiting split by the phases of the awaited batch, from the `committed` events."""
    shares = phase_shares(metrics, window=window, stage=stage)
    if not shares:
        return {}
    judged = judged_lines(metrics, window=window, stage=stage)
    spent = {event["batch"]: event.get("seconds") or {} for event in committed}
    waited = dict(total=0.0, evaluate=0.0, commit=0.0)
    for line in judged:
        left = number(line["seconds"], "wait") or 0.0
        waited["total"] += left
        for phase in ("commit", "evaluate"):  # the last phases of a batch, from its end on
            part = min(left, number(spent.get(line["step"], {}), phase) or 0.0)
            waited[phase] += part
            left -= part
    wait = shares.pop("wait")
    of_wait = {phase: wait * waited[phase] / waited["total"] if wait else 0.0 for phase in ("evaluate", "commit")}
    return {
        "wait for rollouts": max(0.0, wait - of_wait["evaluate"] - of_wait["commit"]),
        "wait for evaluations": of_wait["evaluate"],
        "wait for commits": of_wait["commit"],
        **shares,
    }


def newest_shares(run_log: RunLog) -> dict[str, float]:
    stage = run_log.recipe.build_schedule().updates_per_stage
    newest = run_log.metrics[-(whole_stages(WINDOW_STEPS, stage) + 1) :]
    return time_shares(newest, run_log.of_kind("committed"), stage=stage)


def bottleneck(shares: Mapping[str, float]) -> str:
    """Return a sentence that names the largest part of a step by its `time_shares`, its share, and the remedy."""
    if not shares:
        return "nothing to judge yet: no step has finished"
    groups = {
        "rollouts": shares["wait for rollouts"],
        "evaluations": shares["wait for evaluations"],
        "committing": shares["wait for commits"],
        "learner": shares["logprobs"] + shares["update"],
        "publishing": shares["publish"],
        "records": shares["record"],
        "checkpoints": shares["save"],
    }
    slowest, runner_up = sorted(groups, key=groups.__getitem__, reverse=True)[:2]
    verdict = f"{slowest}: {_ADVICE[slowest].format(share=f'{100 * groups[slowest]:.0f} %')}"
    if groups[slowest] - groups[runner_up] < CLOSE:
        verdict += f" (next: {runner_up}, {100 * groups[runner_up]:.0f} %)"
    return verdict


def percent(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.1f} %"


def decimal(value: float | None) -> str:
    return "–" if value is None else f"{value:.4g}"


def count(value: float | None) -> str:
    """Return a whole number with thin spaces between thousands, or a dash."""
    return "–" if value is None else f"{value:,.0f}".replace(",", "\u2009")


def duration(seconds: float) -> str:
    """Return a text such as 42 s, 3 min 20 s or 2 h 05 min."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"

"""The figures of a report, by section.

Most are curves of metrics over steps: rows of CURVES, and what the objective, the correction and the advantage say that
they measure. The rest is drawn here: what neither TensorBoard nor W&B shows.

Speeds, in response tokens a second:

    generated    tokens of a batch ÷ seconds in which it was generated, from when the batch that was done before it was
                 done: batches of async and staged runs are under way together
    updated      tokens that the updates ran through the model ÷ seconds of log-probabilities and updates
    trained      the same ÷ seconds of the whole step, waiting and publishing included
    MFU          6 · parameters · tokens of these samples, prompts included ÷ (seconds of updates · ranks · GPU's peak)

MFU is that of PaLM (arXiv 2204.02311, appendix B) without the products of attention, which makes it a little too low.
Of a mixture, parameters are those that a token visits.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, MaxNLocator

from pipeline.advantages.methods import binomial_weight_curves, weight_curves
from pipeline.analysis.drawing import (
    COLORS,
    SMALL,
    WIDE,
    Line,
    add_values,
    curve,
    legend_above,
    percent_label,
    render,
    steps_axis,
)
from pipeline.analysis.run_log import RunLog, number
from pipeline.analysis.summary import LEARNER_PHASES
from pipeline.control.files import ControlFiles
from pipeline.data.run_directory import RunDirectory, unfenced
from pipeline.data.store import BatchStore
from pipeline.errors import StoreError
from precision.mismatch.statistics import SPLITS
from precision.ratios import LOG_RATIO_EDGES, NUM_LOG_RATIO_BINS
from precision.settings import Measure

LAST_STEPS = 10
"""Over which the tokens of a bucket are counted together."""
NUM_POINTS = 201
"""Solve rates at which weight curves are drawn."""
MOST_NAMES = 8
"""Sources of prompts, or parts of the reward, in one figure; the others are in the metrics."""
_MOST_VALUES, _BINS = 12, 24
"""Of a histogram of rewards: values that are drawn one by one, and else bins."""
_MANY_COLORS = ("blue", "orange", "teal", "violet", "pink", "green", "sand", "gray")
_FIRST_TO_LAST = ("orange", "teal", "blue")
PHASE_COLORS = {
    "wait": "gray",
    "logprobs": "teal",
    "update": "violet",
    "publish": "orange",
    "record": "green",
    "save": "sand",
    "wait for rollouts": "gray",
    "wait for evaluations": "pink",
    "wait for commits": "blue",
}
SPLIT_COLORS = dict(zip((split.name for split in SPLITS), ("violet", "blue", "teal", "orange"), strict=True))

CURVES: dict[str, tuple[Measure, ...]] = {
    "Supervised fine-tuning": (
        Measure("Loss, nats a token", (("loss", "loss", "blue"), ("held_out_loss", "held out", "orange"))),
        Measure("Learning rate", (("lr", "learning rate", "green"),)),
        Measure("Entropy, nats a token", (("entropy", "entropy", "violet"),)),
        Measure("Gradient norm", (("grad_norm", "norm", "orange"),), log=True),
    ),
    "Learning": (
        Measure("Training reward", (("reward_mean", "mean reward", "blue"), ("solve_rate", "solved", "teal"))),
        Measure("Entropy, nats a token", (("entropy", "entropy", "violet"),)),
        Measure("Gradient norm", (("grad_norm", "norm", "orange"),), log=True),
        Measure("Learning rate", (("lr", "learning rate", "green"),)),
        Measure("Response length, tokens", (("response_tokens_mean", "mean", "teal"),)),
        Measure("Truncated responses", (("truncated_share", "share", "pink"),), percent=True, floor=0.0),
        Measure("Reverse KL to the teacher, nats a token", (("reverse_kl", "trained on", "blue"),)),
    ),
    "Mismatch between engine and learner": (
        Measure("Effective sample size", (("ess", "of tokens", "blue"), ("sequence_ess", "of sequences", "teal"))),
        Measure(
            "KL from engine to learner, nats a token", (("k3_kl", "k3", "blue"), ("k2_kl", "k2", "orange")), log=True
        ),
        Measure(
            "Staleness, versions", (("lag_max", "oldest token", "orange"), ("lag_mean", "mean", "blue")), floor=0.0
        ),
        Measure(
            "Effective sample size by sign of A",
            (
                ("mismatch/advantage/positive/ess", "A > 0", "teal"),
                ("mismatch/advantage/negative/ess", "A < 0", "orange"),
            ),
        ),
        Measure(
            "Log-ratio of a token, nats",
            (("log_ratio_p99", "99 %", "orange"), ("log_ratio_p50", "median", "ink"), ("log_ratio_p1", "1 %", "blue")),
        ),
        Measure(
            "Tokens beyond a factor of 2",
            (("ratio_above_2_share", "ratio > 2", "blue"), ("ratio_below_half_share", "ratio < 1/2", "orange")),
            percent=True,
            floor=0.0,
        ),
    ),
    "Experts": (
        Measure(
            "ESS with the engine's experts, and with the learner's",
            (("ess_with_replay", "replayed", "blue"), ("ess_without_replay", "own experts", "orange")),
        ),
        Measure(
            "k3 KL to the engine, of the same tokens",
            (("k3_kl_with_replay", "replayed", "blue"), ("k3_kl_without_replay", "own experts", "orange")),
            log=True,
        ),
    ),
}
"""Figures of a section that every run has where it has the metrics."""
KL_TO_REFERENCE = Measure("KL to the reference, nats a token", (("kl_to_reference", "k3", "violet"),), floor=0.0)


@dataclass(frozen=True)
class Figure:
    """An <svg> with its title; `wide`: it takes the whole width of the page."""

    title: str
    svg: str
    wide: bool = False


@dataclass(frozen=True)
class Section:
    """A part of the page."""

    title: str
    text: str
    figures: tuple[Figure, ...]


def sections(run_log: RunLog) -> list[Section]:
    """Draw the parts of a page that have a figure."""
    marks = _restarts(run_log)

    def curves(title: str, more: Sequence[Measure] = ()) -> list[Figure | None]:
        return [_measured(run_log, measure, marks) for measure in (*CURVES.get(title, ()), *more)]

    if run_log.is_sft:
        parts = [("Supervised fine-tuning", "Rest the pointer on a curve to read its value.", curves)]
        return [Section(title, text, tuple(f for f in draw(title) if f)) for title, text, draw in parts]
    recipe = run_log.recipe
    judges_alone = recipe.distillation is not None and recipe.distillation.judges_alone
    mismatch, advantage = "Mismatch between engine and learner", recipe.advantage
    told: list[tuple[str, str, list[Figure | None]]] = [
        ("Held-out prompts", "Never trained on. The band is the 95 % interval of pass@1.", _held_out(run_log)),
        (
            "Learning",
            "Rest the pointer on a curve to read its value; docs/metrics.md says what is healthy. Dotted lines mark "
            "the first step after a restart, or under a changed recipe.",
            curves("Learning"),
        ),
        (
            "Rewards",
            "Sources are those of the recipe's task. A part is the mean over the samples of which the reward named it.",
            [
                _reward_histogram(run_log),
                _named(run_log, "Reward, by source", "sources", "reward_mean", marks),
                _named(run_log, "Parts of the reward", "reward_parts", None, marks),
            ],
        ),
        (
            mismatch,
            "Every token is scored again by the learner before it is trained on. Equal policies would have ESS 1.",
            [*curves(mismatch), _buckets(run_log), _log_ratio_histogram(run_log)],
        ),
        ("Controller", *_controller(run_log)),
        (
            "Experts",
            "The learner sends each token to the experts that the engine chose. Some samples are scored with its own "
            "choice too: the distance between the curves is what routing alone would add to the mismatch.",
            curves("Experts"),
        ),
        (
            "Objective and correction",
            "Shares are of tokens, whatever the mean of the loss counts alike: of those that were run through the "
            "model, or of all of the step where they are found before.",
            curves("", (*recipe.objective.measures, *recipe.correction.measures, KL_TO_REFERENCE)),
        ),
        (
            "Advantage",
            f"How much weight {advantage.name} gives a prompt by its solve rate, before any normalization, with the "
            f"newest values of what moves: full lines for very large groups, dashed for groups of "
            f"{recipe.rollout.group_size}.",
            [] if judges_alone else [_weights_by_solve_rate(run_log), *curves("", advantage.measures)],
        ),
        ("Where the time goes", _why_no_mfu(run_log), [_phase_seconds(run_log), *_speed_figures(run_log, marks)]),
    ]
    drawn = [Section(title, text, tuple(figure for figure in own if figure)) for title, text, own in told]
    return [section for section in drawn if section.figures]


def _figure(title: str, svg: str | None, *, wide: bool = False) -> Figure | None:
    return None if svg is None else Figure(title, svg, wide)


def _measured(run_log: RunLog, measure: Measure, marks: Sequence[int]) -> Figure | None:
    lines: list[Line] = [(*run_log.series(metric), label, color) for metric, label, color in measure.lines]
    smooth = measure.title != "Learning rate"
    how = dict(percent=measure.percent, log=measure.log, floor=measure.floor, smooth=smooth)
    return _figure(measure.title, curve(measure.title, lines, marks=marks, **how))  # type: ignore[arg-type]


def _restarts(run_log: RunLog) -> list[int]:
    """Return the first step that ended after each restart, and those from which another recipe holds."""
    times = {int(line["step"]): float(line["time"]) for line in run_log.metrics}
    steps = {int(event["step"]) for event in run_log.of_kind("recipe_changed") if event.get("step") in times}
    for event in run_log.of_kind("restarted"):
        steps.update([step for step, time in times.items() if time > event["time"]][:1])
    return sorted(steps)


def _held_out(run_log: RunLog) -> list[Figure | None]:
    """Draw pass@1 with its 95 % interval, pass@k for the largest k, and the mean reward, by policy version."""
    told = run_log.evaluations
    ones = [(int(e["version"]), value) for e in told if (value := number(e, "pass_at_1")) is not None]
    ks = [int(k) for event in told for k in event.get("pass_at_k") or {} if k.isdecimal()]
    k = max(ks, default=1)
    many = [(int(e["version"]), v) for e in told if (v := number(e.get("pass_at_k") or {}, str(k))) is not None]
    rewards = [(int(e["version"]), value) for e in told if (value := number(e, "reward_mean")) is not None]
    band = [
        (int(event["version"]), low, high)
        for event in told
        if (low := number(event, "pass_at_1_low")) is not None and (high := number(event, "pass_at_1_high")) is not None
    ]

    def line(points: Sequence[tuple[int, float]], label: str, color: str) -> Line:
        return [x for x, _ in points], [y for _, y in points], label, color

    def more(axes: Axes) -> None:
        if band:
            versions, low, high = zip(*band, strict=True)
            axes.fill_between(versions, low, high, color=COLORS["blue"], alpha=0.15, linewidth=0)
        axes.plot(*line(ones, "", "")[:2], "o", color=COLORS["blue"], markersize=4, label="_nolegend_")
        axes.annotate(percent_label(round(ones[-1][1], 3)), ones[-1], (6, -3), textcoords="offset points")
        axes.margins(x=0.07)

    lines = [*([line(many, f"pass@{k}", "teal")] if k > 1 else []), line(ones, "pass@1", "blue")]
    how: dict[str, Any] = dict(smooth=False, xlabel="policy version")
    passes = curve("held-out pass@1", lines, percent=True, floor=0.0, size=WIDE, more=more, **how) if ones else None
    reward = curve("held-out reward", [line(rewards, "mean reward", "blue")], **how)
    return [_figure("Held-out pass@1", passes, wide=True), _figure("Held-out reward", reward)]


def _named(run_log: RunLog, title: str, group: str, metric: str | None, marks: Sequence[int]) -> Figure | None:
    """Draw a number of each source or part, whose names users gave, the first MOST_NAMES of them."""
    found: dict[str, tuple[list[int], list[float]]] = {}
    for line in run_log.metrics:
        of_line: dict[str, Any] = line[group] if isinstance(line.get(group), dict) else {}
        for name, value in of_line.items():
            read = (
                number(of_line, name) if metric is None else number(value, metric) if isinstance(value, dict) else None
            )
            if read is not None:
                steps, values = found.setdefault(name, ([], []))
                steps.append(int(line["step"]))
                values.append(read)
    lines: list[Line] = [
        (*points, name, color)
        for (name, points), color in zip(list(found.items())[:MOST_NAMES], _MANY_COLORS, strict=False)
    ]
    return _figure(title, curve(title, lines, marks=marks))


def _reward_histogram(run_log: RunLog) -> Figure | None:
    """Draw the share of samples by their reward, of the first, the middle and the newest batch that is still there.
    Samples without a reward, and damaged batches, are left out. Few values are drawn one by one, many in bins."""
    folder = RunDirectory(run_log.run_dir).batches
    store = BatchStore(folder)
    there = [index for index in store.committed() if index < run_log.num_steps] if folder.is_dir() else []
    found = []
    for index in sorted({there[0], there[(len(there) - 1) // 2], there[-1]}) if there else []:
        with suppress(StoreError):
            batch = store.read_samples(index)
            if batch.judged.any():
                found.append((index, batch.reward[batch.judged]))
    if not found:
        return None
    values = np.unique(np.concatenate([rewards for _, rewards in found]))
    edges = None if len(values) <= _MOST_VALUES else MaxNLocator(_BINS).tick_values(values[0], values[-1])
    names = [f"reward {value:.4g}" for value in values]
    if edges is not None:
        names = [f"reward {low:.4g} to {high:.4g}" for low, high in pairwise(edges)]

    def draw(axes: Axes) -> None:
        width = 0.8 / len(found)
        for place, ((batch, rewards), color) in enumerate(zip(found, _FIRST_TO_LAST[-len(found) :], strict=True)):
            counts = (rewards == values[:, None]).sum(axis=1) if edges is None else np.histogram(rewards, edges)[0]
            shares = counts / len(rewards)
            at = np.arange(len(names)) + (place - (len(found) - 1) / 2) * width
            axes.bar(at, shares, width, color=COLORS[color], label=f"batch {batch}, mean {rewards.mean():.4g}")
            add_values(axes, at.tolist(), shares.tolist(), [f"batch {batch}, {name}" for name in names], color)
        if edges is None:
            axes.set_xticks(range(len(values)), [f"{value:.4g}" for value in values])
        else:
            axes.set_xticks(np.arange(len(edges))[::2] - 0.5, [f"{edge:.4g}" for edge in edges[::2]])
        axes.set_xlim(-0.6, len(names) - 0.4)
        axes.set_xlabel("reward of a sample")
        axes.yaxis.set_major_formatter(FuncFormatter(percent_label))
        legend_above(axes)

    return Figure("Rewards of the samples", render("rewards of the samples", WIDE, draw), wide=True)


def mean_by_bucket(run_log: RunLog) -> list[tuple[str, str, float, float]]:
    """Return (split, bucket, share of all tokens, ESS) of the buckets that hold tokens of the last steps, in the order
    of the splits. The ESS is the tokens' mean of the steps' ESS, since each step is reweighted by itself."""
    lines = [line for line in run_log.metrics[-LAST_STEPS:] if isinstance(line.get("mismatch"), dict)]
    total = sum(number(line, "num_tokens") or 0.0 for line in lines)
    found = []
    for split in SPLITS:
        for name in split.buckets:
            weight = weighted = 0.0
            for line in lines:
                cell = line["mismatch"].get(split.name, {}).get(name) or {}
                share, ess = number(cell, "share"), number(cell, "ess")
                if share is not None and ess is not None:
                    tokens = share * (number(line, "num_tokens") or 0.0)
                    weight, weighted = weight + tokens, weighted + ess * tokens
            if weight > 0:
                found.append((split.name, name, weight / total, weighted / weight))
    return found


def _buckets(run_log: RunLog) -> Figure | None:
    """Draw 1 - ESS by what the token is."""
    found = mean_by_bucket(run_log)
    order = [split.name for split in SPLITS]

    def tick(split: str, name: str) -> str:
        if split == "advantage":
            return {"negative": "A < 0", "zero": "A = 0", "positive": "A > 0"}[name]
        low, dash, high = name.partition("-")
        return f"≥ {low}" if dash and not high else name.replace("-", "–")

    def draw(axes: Axes) -> None:
        places = [place + 0.8 * order.index(split) for place, (split, *_) in enumerate(found)]
        for split in SPLITS:
            own = [(at, 1.0 - one[3]) for at, one in zip(places, found, strict=True) if one[0] == split.name]
            bars = [at for at, _ in own], [height for _, height in own]
            axes.bar(*bars, 0.72, color=COLORS[SPLIT_COLORS[split.name]], label=split.title)
        for place, (_, _, share, ess) in zip(places, found, strict=True):
            text = percent_label(float(f"{share:.2g}"))
            how: dict[str, Any] = dict(textcoords="offset points", ha="center", fontsize=7, color=COLORS["muted"])
            axes.annotate(text, (place, 1.0 - ess), (0, 2), **how)
        axes.set_xticks(places, [tick(split, name) for split, name, *_ in found], fontsize=7.5)
        axes.set_xlim(places[0] - 0.7, places[-1] + 0.7)
        axes.set_ylim(0.0, 1.15 * max(1e-9, *(1.0 - ess for *_, ess in found)))
        legend_above(axes)

    title = (
        f"1 − effective sample size, by what the token is (last {LAST_STEPS} steps; numbers are shares of the tokens)"
    )
    return _figure(title, render("ESS by bucket", WIDE, draw) if found else None, wide=True)


def _log_ratio_histogram(run_log: RunLog) -> Figure | None:
    """Draw the share of tokens in each log-ratio bin for the first, middle and last step that counted them.

    Bins are drawn equally wide, so the x axis is logarithmic on both sides of zero; the y axis is logarithmic too.
    """
    counted = [line for line in run_log.metrics if len(line.get("log_ratio_histogram") or ()) == NUM_LOG_RATIO_BINS]
    lines = [line for line in counted if sum(line["log_ratio_histogram"]) > 0]
    chosen = sorted({0, (len(lines) - 1) // 2, len(lines) - 1}) if lines else []

    def draw(axes: Axes) -> None:
        used: list[int] = []
        for position, color in zip(chosen, _FIRST_TO_LAST[-len(chosen) :], strict=True):
            line = lines[position]
            counts = np.asarray(line["log_ratio_histogram"], float)
            used += np.flatnonzero(counts).tolist()
            value = number(line, "ess")
            label = f"step {line['step']}" + (f", ESS {value:.4f}" if value is not None else "")
            share = np.where(counts > 0, counts / counts.sum(), np.nan)
            axes.stairs(share, color=COLORS[color], label=label, linewidth=1.6, baseline=None)
        axes.set_yscale("log")
        ticks = [(NUM_LOG_RATIO_BINS / 2, "0")]
        for place, edge in enumerate(LOG_RATIO_EDGES, start=1):
            decade = math.log10(abs(edge))
            # A power of ten; the smallest would run into the 0.
            if abs(edge) >= 2.0 * min(map(abs, LOG_RATIO_EDGES)) and abs(decade - round(decade)) < 1e-6:
                ticks.append((place, f"{edge:.0e}".replace("e-0", "e-") if abs(edge) < 0.01 else f"{edge:g}"))
        axes.set_xticks([at for at, _ in ticks], [text for _, text in ticks])
        axes.set_xlim(min(used) - 0.5, max(used) + 1.5)
        axes.set_xlabel("log π(learner) − log π(engine) of a token, nats")
        axes.set_ylabel("share of tokens")
        legend_above(axes)

    return _figure("Log-ratio of a token", render("log-ratio histogram", WIDE, draw) if chosen else None, wide=True)


def floors(run_log: RunLog, steps: Sequence[int]) -> list[tuple[float, int, int]]:
    """Return (floor, first step, last step) of each stretch of steps whose controllers had one floor. A fork may have
    another floor than its parent, or the controller that its parent lacked."""

    def floor_of(step: int) -> float | None:
        settings = run_log.recipe_of(step).controller
        return None if settings is None else settings.ess_floor

    stretches = [(floor, list(own)) for floor, own in groupby(steps, key=floor_of)]
    return [(floor, own[0], own[-1]) for floor, own in stretches if floor is not None]


def _controller(run_log: RunLog) -> tuple[str, list[Figure | None]]:
    """Tell each decision of the ESS controller, and draw the ESS of each batch against the floor that held for it."""
    steps, values = run_log.series("ess")
    held = floors(run_log, steps)
    if run_log.recipe.controller is None and not held:
        return "", []
    # The records hold each decision once; the events may have lost or repeated one.
    files = ControlFiles(RunDirectory(run_log.run_dir).control, unfenced)
    decided = [(record.step, record.decision) for record in files.decisions() if record.decision is not None]
    told = [f"({n}) After step {step}: {d.rung}. {d.because}" for n, (step, d) in enumerate(decided, start=1)]
    last = files.newest()
    if run_log.recipe.controller is not None and last is not None and last.state.cannot_help:
        told.append("The ESS is below the floor, and no rung is left that could raise it to the floor.")

    def more(axes: Axes) -> None:
        for place, (floor, first, last) in enumerate(held):
            label = "_nolegend_" if place else "floor"
            style: dict[str, Any] = dict(colors=COLORS["muted"], linestyles="--", label=label, linewidth=1.0)
            axes.hlines([floor], [first - 0.5], [last + 0.5], **style)
        for count, (step, decision) in enumerate(decided, start=1):
            color = COLORS["teal" if decision.action == "descend" else "orange"]
            axes.axvline(step, color=color, linewidth=1.2)
            axes.annotate(str(count), (step, axes.get_ylim()[1]), (2, -9), textcoords="offset points", color=color)

    drawn = curve("ESS under control", [(steps, values, "ESS / tokens", "blue")], size=WIDE, more=more)
    return " ".join(told) or "The ESS has needed no decision.", [_figure("ESS, floor and decisions", drawn, wide=True)]


def _weights_by_solve_rate(run_log: RunLog) -> Figure | None:
    """Draw m_S and m_F over the solve rate of a prompt; one line where they are the same."""
    if not run_log.metrics:
        return None
    advantage, group_size = run_log.recipe.advantage.at_last(run_log.last), run_log.recipe.rollout.group_size
    p = np.linspace(0.0, 1.0, NUM_POINTS)
    infinite, finite = weight_curves(advantage, p), binomial_weight_curves(advantage, p, group_size)

    def draw(axes: Axes) -> None:
        for found in (finite, infinite):
            if found is None:
                continue
            lines = [("successes", found.success, "blue"), ("failures", found.failure, "orange")]
            if np.allclose(found.success, found.failure):
                lines = [("both", found.success, "violet")]
            dashed = found is finite and infinite is not None
            style: dict[str, Any] = dict(linestyle="--", linewidth=1.0, alpha=0.7) if dashed else {}
            for label, weight, color in lines:
                axes.plot(found.p, weight, color=COLORS[color], label="" if dashed else label, **style)
        axes.set_xlabel("solve rate of a prompt")
        axes.set_xlim(0.0, 1.0)
        axes.set_ylim(bottom=0.0)
        axes.legend(loc="best", fontsize=8)

    return Figure("Weight by solve rate", render("weight by solve rate", SMALL, draw))


def _phase_seconds(run_log: RunLog) -> Figure | None:
    """Draw the seconds of each learner phase, stacked over steps."""
    lines = [line for line in run_log.metrics if line.get("seconds")]
    steps = np.array([int(line["step"]) for line in lines])
    phases = [phase for phase in LEARNER_PHASES if any(phase in line["seconds"] for line in lines)]
    seconds = np.array([[number(line["seconds"], phase) or 0.0 for phase in phases] for line in lines])

    def draw(axes: Axes) -> None:
        bins = np.array_split(np.arange(len(steps)), min(len(steps), 60))
        centers = np.array([steps[chosen].mean() for chosen in bins])
        heights = np.array([seconds[chosen].mean(axis=0) for chosen in bins])
        bottom, width = np.zeros(len(centers)), 0.86 * (steps[-1] - steps[0] + 1) / len(bins)
        for column, phase in enumerate(phases):
            axes.bar(centers, heights[:, column], width, bottom, color=COLORS[PHASE_COLORS[phase]], label=phase)
            bottom += heights[:, column]
        steps_axis(axes)
        # One slow step, such as the first, must not flatten the rest.
        axes.set_ylim(0.0, max(1e-9, min(bottom.max(), 3.0 * float(np.quantile(bottom, 0.9)))) * 1.05)
        axes.margins(x=0.01)
        axes.set_ylabel("seconds")
        legend_above(axes)

    drawn = render("seconds of each phase", WIDE, draw) if phases else None
    return _figure("Learner, seconds a step", drawn, wide=True)


def _speed_figures(run_log: RunLog, marks: Sequence[int]) -> list[Figure | None]:
    found = speeds(run_log)

    def line(name: str, label: str, color: str) -> Line:
        known = [(step, value) for step, value in ((of["step"], of[name]) for of in found) if value is not None]
        return [step for step, _ in known], [value for _, value in known], label, color

    lines = [
        line("generated", "generated", "blue"),
        line("updated", "trained, of the updates", "violet"),
        line("trained", "trained, of the whole step", "gray"),
    ]
    title, mfu = "Response tokens a second", "Model FLOPs utilization (MFU)"
    return [
        _figure(title, curve(title, lines, log=True, floor=0.0, marks=marks)),
        _figure(mfu, curve(mfu, [line("mfu", "MFU", "teal")], percent=True, floor=0.0, marks=marks)),
    ]


def speeds(run_log: RunLog) -> list[dict[str, Any]]:
    """Return of each step `generated`, `updated` and `trained`, response tokens a second, and `mfu`; None where it is
    not known."""
    committed = {event["batch"]: event for event in run_log.of_kind("committed")}
    ends = sorted(
        (started + spent, started, batch)
        for batch, event in committed.items()
        if (started := number(event, "started")) is not None
        and (spent := number(event.get("seconds") or {}, "generate")) is not None
    )
    before = [-math.inf, *(end for end, *_ in ends)]
    generating_s = {batch: end - max(started, last) for last, (end, started, batch) in zip(before, ends, strict=False)}
    noted = _learner_environments(run_log)
    found = []
    for line in run_log.metrics:
        step, seconds = line["step"], line.get("seconds") or {}
        machine = next((event for event in reversed(noted) if event["time"] <= line["time"]), {"ranks": None})
        phases = {phase: number(seconds, phase) or 0.0 for phase in seconds}
        mean, tokens = number(line, "response_tokens_mean"), number(line, "num_updated_tokens")
        sampled = mean * committed[step]["samples"] if mean is not None and step in committed else None
        facts = [number(machine, name) for name in ("active_parameters", "ranks", "peak_tflops")]
        model_tokens = number(line, "num_model_tokens")
        mfu = None
        if model_tokens is not None and None not in facts:
            parameters, ranks, peak = (fact or 0.0 for fact in facts)
            mfu = _over(6.0 * parameters * model_tokens, phases.get("update", 0.0) * ranks * peak * 1e12)
        found.append(
            dict(
                step=step,
                generated=_over(sampled, generating_s.get(step)),
                updated=_over(tokens, phases.get("logprobs", 0.0) + phases.get("update", 0.0)),
                trained=_over(tokens, sum(phases.values())),
                mfu=mfu,
            )
        )
    return found


def _over(amount: float | None, seconds: float | None) -> float | None:
    return None if amount is None or not seconds else amount / seconds


def _learner_environments(run_log: RunLog) -> list[Mapping[str, Any]]:
    return [event for event in run_log.of_kind("environment") if event["role"] == "learner"]


def _why_no_mfu(run_log: RunLog) -> str:
    """Say why the newest step has no MFU; empty where it has one."""
    noted = _learner_environments(run_log)
    if not noted:
        return "There is no MFU: what the learner ran on was not noted."
    if not noted[-1].get("gpus"):
        return "There is no MFU: the learner ran on a CPU, whose peak is not known."
    if number(noted[-1], "peak_tflops") is None:
        gpus = " and ".join(sorted(set(noted[-1]["gpus"])))
        return f"There is no MFU: the peak of {gpus} is not known."
    return ""

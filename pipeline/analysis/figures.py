"""Draw the figures of a report, by section.

A report has the curves by which a run is judged and the figures that neither TensorBoard nor W&B shows; `evenkeel
export` writes every other metric over steps. Speeds are in response tokens a second:

    generated    tokens of a batch ÷ seconds of its generation; time before the end of an earlier batch is left out,
                 since batches of async and staged runs overlap
    updated      tokens that the updates ran through the model ÷ seconds of log-probabilities and updates
    trained      the same tokens ÷ seconds of the whole step, waiting and publishing included
    MFU          6 · parameters · tokens of these samples, prompts included ÷ (seconds of updates · ranks · GPU's peak)

MFU is that of PaLM (arXiv 2204.02311, appendix B) without the products of attention, so it is slightly too low. For a
mixture of experts, parameters are those that a token visits.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, MaxNLocator

from pipeline.advantages.methods import FADE, Power, weight_curves
from pipeline.analysis import drawing
from pipeline.analysis.drawing import COLORS, WIDE, curve, picture
from pipeline.analysis.run_log import SFT_FILE, RunLog, number
from pipeline.analysis.summary import LEARNER_PHASES
from pipeline.control.files import ControlFiles
from pipeline.data.batch import StopReason
from pipeline.data.run_directory import RunDirectory, unfenced
from pipeline.data.run_recipes import recipe_of_step
from pipeline.data.store import BatchStore
from pipeline.errors import StoreError
from precision.mismatch.statistics import SPLITS
from precision.ratios import LOG_RATIO_EDGES, NUM_LOG_RATIO_BINS

LAST_STEPS = 10
"""Number of last steps whose tokens are counted together in the buckets."""
NUM_POINTS = 201
_MOST_VALUES, _BINS = 12, 24
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

Curves = dict[str, tuple[tuple[str, str, str], ...]]
"""Title of a figure → metric, label and color of each line."""
_SFT: Curves = {
    "Loss, nats a token": (("loss", "loss", "blue"), ("held_out_loss", "held out", "orange")),
    "Gradient norm": (("grad_norm", "norm", "orange"),),
}
_LEARNING: Curves = {
    "Training reward": (("reward_mean", "mean reward", "blue"), ("solve_rate", "solved", "teal")),
    "Entropy, nats a token": (("entropy", "entropy", "violet"),),
    "Gradient norm": (("grad_norm", "norm", "orange"),),
    "Reverse KL to the teacher, nats a token": (("reverse_kl", "trained on", "blue"),),
}
_MISMATCH: Curves = {
    "Effective sample size": (("ess", "of tokens", "blue"), ("sequence_ess", "of sequences", "teal")),
    "KL from engine to learner, nats a token": (("k3_kl", "k3", "blue"), ("k2_kl", "k2", "orange")),
    "Staleness, versions": (("lag_max", "oldest token", "orange"), ("lag_mean", "mean", "blue")),
}
_EPISODES: Curves = {
    "Turns and tool calls of an episode": (
        ("episodes/turns_mean", "turns", "blue"),
        ("episodes/tool_calls_mean", "tool calls", "orange"),
        ("episodes/rows_mean", "rows", "gray"),
    ),
    "Seconds of an episode outside the policy": (("episodes/tool_s_mean", "in tools, environment and agent", "teal"),),
}
_STOP_COLORS = ("blue", "orange", "teal", "violet", "pink", "green", "sand", "gray")
_LOGARITHMIC = ("Gradient norm", "KL from engine to learner, nats a token")


@dataclass(frozen=True)
class Figure:
    """An <svg> with its title. A `wide` figure takes the whole width of the page."""

    title: str
    svg: str
    wide: bool = False


@dataclass(frozen=True)
class Section:
    title: str
    text: str
    figures: tuple[Figure, ...]


def sections(run_log: RunLog) -> list[Section]:
    """Draw the sections of a page that have a figure. Dotted lines mark the first step that ended after each restart,
    and the first step of each changed recipe."""
    times = {int(line["step"]): float(line["time"]) for line in run_log.metrics}
    marks = {int(event["step"]) for event in run_log.of_kind("recipe_changed") if event.get("step") in times}
    for event in run_log.of_kind("restarted"):
        marks.update([step for step, time in times.items() if time > event["time"]][:1])

    def curves(chosen: Curves) -> list[Figure]:
        drawn = {
            title: curve(
                title,
                [(*run_log.series(metric), label, color) for metric, label, color in lines],
                marks=sorted(marks),
                log=title in _LOGARITHMIC,
                floor=0.0 if title.startswith("Staleness") else None,
            )
            for title, lines in chosen.items()
        }
        return [Figure(title, svg) for title, svg in drawn.items() if svg]

    rest = "Rest the pointer on a curve to read its value; "
    if (run_log.run_dir / SFT_FILE).exists():
        told = [("Supervised fine-tuning", f"{rest}the rest is for evenkeel export.", curves(_SFT))]
    else:
        recipe = run_log.recipe
        judges_alone = recipe.distillation is not None and recipe.distillation.judges_alone
        told = [
            ("Held-out prompts", "Never trained on. The band is the 95 % interval of pass@1.", held_out(run_log)),
            (
                "Learning",
                f"{rest}docs/metrics.md says what is healthy. Dotted lines mark the first step after a restart, or "
                "under a changed recipe. Every other metric is for evenkeel export, to TensorBoard or W&B.",
                [*curves(_LEARNING), *reward_histogram(run_log), *issued_and_trained(run_log, sorted(marks))],
            ),
            (
                "Episodes",
                "Means over the episodes of a batch. Of the first figure, each row after the first is a branch.",
                [*curves(_EPISODES), *stops(run_log, sorted(marks))],
            ),
            (
                "Mismatch between engine and learner",
                "Every token is scored again by the learner before it is trained on. Equal policies would have ESS 1.",
                [*curves(_MISMATCH), *buckets(run_log), *log_ratio_histogram(run_log)],
            ),
            ("Controller", *controller(run_log)),
            (
                "Advantage",
                f"How much weight {recipe.advantage.name} gives a prompt by its solve rate, before any normalization, "
                f"with the newest values of what moves, in groups of {recipe.rollout.group_size}.",
                [] if judges_alone or not run_log.metrics else [weights_by_solve_rate(run_log)],
            ),
            ("Where the time goes", *times_and_speeds(run_log, sorted(marks))),
        ]
    return [Section(title, text, tuple(figures)) for title, text, figures in told if figures]


def held_out(run_log: RunLog) -> list[Figure]:
    """Draw pass@1 with its 95 % interval, and pass@k for the largest k, by policy version."""
    events = [(int(event["version"]), event) for event in run_log.evaluations]
    ones = [(version, value) for version, event in events if (value := number(event, "pass_at_1")) is not None]
    if not ones:
        return []
    k = max((int(k) for _, event in events for k in event.get("pass_at_k") or {} if k.isdecimal()), default=1)
    many = [(version, number(event.get("pass_at_k") or {}, str(k))) for version, event in events]
    band = [
        (version, low, high)
        for version, event in events
        if (low := number(event, "pass_at_1_low")) is not None and (high := number(event, "pass_at_1_high")) is not None
    ]

    def more(axes: Axes) -> None:
        if band:
            versions, low, high = zip(*band, strict=True)
            axes.fill_between(versions, low, high, color=COLORS["blue"], alpha=0.15, linewidth=0)
        axes.plot(*zip(*ones, strict=True), "o", color=COLORS["blue"], markersize=4, label="_nolegend_")
        axes.annotate(drawing.percent_label(round(ones[-1][1], 3)), ones[-1], (6, -3), textcoords="offset points")
        axes.margins(x=0.07)

    lines = [line_of(many, f"pass@{k}", "teal")] if k > 1 else []
    how: dict[str, Any] = dict(percent=True, floor=0.0, smooth=False, xlabel="policy version", size=WIDE, more=more)
    svg = curve("held-out pass@1", [*lines, line_of(ones, "pass@1", "blue")], **how)
    return [Figure("Held-out pass@1", svg or "", wide=True)]


def line_of(points: Iterable[tuple[int, float | None]], label: str, color: str) -> drawing.Line:
    known = [(x, y) for x, y in points if y is not None]
    return [x for x, _ in known], [y for _, y in known], label, color


def reward_histogram(run_log: RunLog) -> list[Figure]:
    """Draw the share of samples by reward, in the first, the middle and the newest batch that still exists. Samples
    without a reward, and damaged batches, are left out. Few values are drawn one by one, many in bins."""
    folder = RunDirectory(run_log.run_dir).batches
    store = BatchStore(folder)
    there = [index for index in store.committed() if index < run_log.num_steps] if folder.is_dir() else []
    found = []
    for index in sorted({there[0], there[(len(there) - 1) // 2], there[-1]}) if there else []:
        with suppress(StoreError):
            batch = store.read_samples(index)
            if batch.judged.any():
                found.append((index, batch.reward[batch.first_rows][batch.judged[batch.first_rows]]))
    if not found:
        return []
    values = np.unique(np.concatenate([rewards for _, rewards in found]))
    edges = None if len(values) <= _MOST_VALUES else MaxNLocator(_BINS).tick_values(values[0], values[-1])
    names = [f"reward {value:.4g}" for value in values]
    if edges is not None:
        names = [f"reward {low:.4g} to {high:.4g}" for low, high in pairwise(edges)]
    with picture("rewards of the samples", WIDE) as drawn:
        axes, width = drawn.axes, 0.8 / len(found)
        for place, ((index, rewards), color) in enumerate(zip(found, _FIRST_TO_LAST[-len(found) :], strict=True)):
            counts = (rewards == values[:, None]).sum(axis=1) if edges is None else np.histogram(rewards, edges)[0]
            shares = counts / len(rewards)
            at = np.arange(len(names)) + (place - (len(found) - 1) / 2) * width
            axes.bar(at, shares, width, color=COLORS[color], label=f"batch {index}, mean {rewards.mean():.4g}")
            told = [f"batch {index}, {name}" for name in names]
            drawing.add_values(axes, at.tolist(), shares.tolist(), told, color)
        if edges is None:
            axes.set_xticks(range(len(values)), [f"{value:.4g}" for value in values])
        else:
            axes.set_xticks(np.arange(len(edges))[::2] - 0.5, [f"{edge:.4g}" for edge in edges[::2]])
        axes.set_xlim(-0.6, len(names) - 0.4)
        axes.set_xlabel("reward of a sample")
        axes.yaxis.set_major_formatter(FuncFormatter(drawing.percent_label))
        drawing.legend_above(axes)
    return [Figure("Rewards of the samples", drawn.svg, wide=True)]


def issued_and_trained(run_log: RunLog, marks: Sequence[int]) -> list[Figure]:
    """Draw the median, and a band from the 10 % to the 90 % quantile, of lengths and of rewards: of the answers that
    were issued, and of those that were trained, over the newest batches at each step."""
    found = []
    for of, title in (("length", "Lengths of answers, tokens"), ("reward", "Rewards of groups")):
        bands = {
            side: [run_log.series(f"{side}_{of}_p{share}") for share in (10, 50, 90)] for side in ("issued", "trained")
        }
        colors = dict(issued="orange", trained="blue")

        def more(axes: Axes, bands: dict[str, Any] = bands, colors: dict[str, str] = colors) -> None:
            for side, ((steps, low), _, (_, high)) in bands.items():
                axes.fill_between(steps, low, high, color=COLORS[colors[side]], alpha=0.15, linewidth=0)

        lines = [(*median, side, colors[side]) for side, (_, median, _) in bands.items()]
        svg = curve(f"{title}: issued and trained", lines, marks=marks, smooth=False, size=WIDE, more=more)
        found += (
            [Figure(f"{title}: issued and trained (median, and 10 to 90 % of the tokens)", svg, True)] if svg else []
        )
    return found


def stops(run_log: RunLog, marks: Sequence[int]) -> list[Figure]:
    """Draw the share of the episodes that something else than their agent ended, by reason."""
    reasons = [reason.name.lower() for reason in StopReason if reason is not StopReason.FINISHED]
    lines = [
        (*run_log.series(f"episodes/stopped/{name}"), name.replace("_", " "), color)
        for name, color in zip(reasons, _STOP_COLORS, strict=True)
    ]
    happened = [line for line in lines if any(line[1])]
    title = "Episodes that did not finish, by reason"
    svg = curve(title, happened, percent=True, floor=0.0, marks=marks, size=WIDE)
    return [Figure(title, svg, wide=True)] if svg else []


def mean_by_bucket(run_log: RunLog) -> list[tuple[str, str, float, float]]:
    """Return (split, bucket, share of all tokens, ESS) of each bucket that holds tokens of the last steps, in the order
    of the splits. The ESS is the token-weighted mean over the steps, since each step is reweighted by itself."""
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


def buckets(run_log: RunLog) -> list[Figure]:
    """Draw 1 - ESS of each bucket of tokens."""
    found = mean_by_bucket(run_log)
    if not found:
        return []
    order, ticks = [split.name for split in SPLITS], []
    signs = {"negative": "A < 0", "zero": "A = 0", "positive": "A > 0"}
    for split_name, name, *_ in found:
        ticks.append(signs[name] if split_name == "advantage" else drawing.range_label(name))
    with picture("ESS by bucket", WIDE) as drawn:
        axes = drawn.axes
        places = [place + 0.8 * order.index(split) for place, (split, *_) in enumerate(found)]
        for split in SPLITS:
            own = [(at, 1.0 - one[3]) for at, one in zip(places, found, strict=True) if one[0] == split.name]
            bars = [at for at, _ in own], [height for _, height in own]
            axes.bar(*bars, 0.72, color=COLORS[SPLIT_COLORS[split.name]], label=split.title)
        for place, (_, _, share, ess) in zip(places, found, strict=True):
            text = drawing.percent_label(float(f"{share:.2g}"))
            how: dict[str, Any] = dict(textcoords="offset points", ha="center", fontsize=7, color=COLORS["muted"])
            axes.annotate(text, (place, 1.0 - ess), (0, 2), **how)
        axes.set_xticks(places, ticks, fontsize=7.5)
        axes.set_xlim(places[0] - 0.7, places[-1] + 0.7)
        axes.set_ylim(0.0, 1.15 * max(1e-9, *(1.0 - ess for *_, ess in found)))
        drawing.legend_above(axes)
    title = (
        f"1 − effective sample size, by what the token is (last {LAST_STEPS} steps; numbers are shares of the tokens)"
    )
    return [Figure(title, drawn.svg, wide=True)]


def log_ratio_histogram(run_log: RunLog) -> list[Figure]:
    """Draw the share of tokens in each log-ratio bin for the first, middle and last step that counted them. Bins are
    equally wide, so the x axis is logarithmic on both sides of zero; the y axis is logarithmic too."""
    counted = [line for line in run_log.metrics if len(line.get("log_ratio_histogram") or ()) == NUM_LOG_RATIO_BINS]
    lines = [line for line in counted if sum(line["log_ratio_histogram"]) > 0]
    if not lines:
        return []
    chosen, used = sorted({0, (len(lines) - 1) // 2, len(lines) - 1}), list[int]()
    with picture("log-ratio histogram", WIDE) as drawn:
        axes = drawn.axes
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
            # Only powers of ten; the smallest would overlap the 0.
            if abs(edge) >= 2.0 * min(map(abs, LOG_RATIO_EDGES)) and abs(decade - round(decade)) < 1e-6:
                ticks.append((place, f"{edge:.0e}".replace("e-0", "e-") if abs(edge) < 0.01 else f"{edge:g}"))
        axes.set_xticks([at for at, _ in ticks], [text for _, text in ticks])
        axes.set_xlim(min(used) - 0.5, max(used) + 1.5)
        axes.set_xlabel("log π(learner) − log π(engine) of a token, nats")
        axes.set_ylabel("share of tokens")
        drawing.legend_above(axes)
    return [Figure("Log-ratio of a token", drawn.svg, wide=True)]


def floors(run_log: RunLog, steps: Sequence[int]) -> list[tuple[float, int, int]]:
    """Return (floor, first step, last step) of each stretch of steps with the same ESS floor. A fork may have another
    floor than its parent, or a controller where its parent had none."""
    controllers = [(step, recipe_of_step(run_log.recipes, step).controller) for step in steps]
    by_floor = groupby(controllers, key=lambda one: None if one[1] is None else one[1].ess_floor)
    stretches = [(floor, [step for step, _ in own]) for floor, own in by_floor]
    return [(floor, own[0], own[-1]) for floor, own in stretches if floor is not None]


def controller(run_log: RunLog) -> tuple[str, list[Figure]]:
    """Return the ESS controller's decisions in words, and a figure of each batch's ESS against its floor."""
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

    svg = curve("ESS under control", [(steps, values, "ESS / tokens", "blue")], size=WIDE, more=more)
    figures = [Figure("ESS, floor and decisions", svg, wide=True)] if svg else []
    return " ".join(told) or "The ESS has needed no decision.", figures


def weights_by_solve_rate(run_log: RunLog) -> Figure:
    """Draw m_S and m_F over the solve rate of a prompt, as one line where they are equal; FADE's are its latest."""
    advantage, p = run_log.recipe.advantage, np.linspace(0.0, 1.0, NUM_POINTS)
    alpha, delta = run_log.last("advantage_alpha"), run_log.last("advantage_delta")
    if isinstance(advantage, FADE) and alpha is not None and delta is not None:
        advantage = Power(alpha=alpha, delta=delta)
    success, failure = weight_curves(advantage, p, run_log.recipe.rollout.group_size)
    with picture("weight by solve rate", drawing.SMALL) as drawn:
        lines = [("successes", success, "blue"), ("failures", failure, "orange")]
        if np.allclose(success, failure):
            lines = [("both", success, "violet")]
        for label, weight, color in lines:
            drawn.axes.plot(p, weight, color=COLORS[color], label=label)
        drawn.axes.set_xlabel("solve rate of a prompt")
        drawn.axes.set_xlim(0.0, 1.0)
        drawn.axes.set_ylim(bottom=0.0)
        drawn.axes.legend(loc="best", fontsize=8)
    return Figure("Weight by solve rate", drawn.svg)


def times_and_speeds(run_log: RunLog, marks: Sequence[int]) -> tuple[str, list[Figure]]:
    """Return the reason for a missing MFU, if any, and figures of the learner's seconds by phase and of the speeds."""
    noted = [event for event in run_log.of_kind("environment") if event["role"] == "learner"]
    why = ""
    if not noted:
        why = "There is no MFU: what the learner ran on was not noted."
    elif not noted[-1].get("gpus"):
        why = "There is no MFU: the learner ran on a CPU, whose peak is not known."
    elif number(noted[-1], "peak_tflops") is None:
        why = f"There is no MFU: the peak of {' and '.join(sorted(set(noted[-1]['gpus'])))} is not known."
    figures = []
    lines = [line for line in run_log.metrics if line.get("seconds")]
    steps = np.array([int(line["step"]) for line in lines])
    if phases := [phase for phase in LEARNER_PHASES if any(phase in line["seconds"] for line in lines)]:
        seconds = np.array([[number(line["seconds"], phase) or 0.0 for phase in phases] for line in lines])
        with picture("seconds of each phase", WIDE) as drawn:
            axes = drawn.axes
            bins = np.array_split(np.arange(len(steps)), min(len(steps), 60))
            centers = np.array([steps[chosen].mean() for chosen in bins])
            heights = np.array([seconds[chosen].mean(axis=0) for chosen in bins])
            bottom, width = np.zeros(len(centers)), 0.86 * (steps[-1] - steps[0] + 1) / len(bins)
            for column, phase in enumerate(phases):
                axes.bar(centers, heights[:, column], width, bottom, color=COLORS[PHASE_COLORS[phase]], label=phase)
                bottom += heights[:, column]
            drawing.steps_axis(axes)
            # One slow step, such as the first, must not flatten the rest.
            axes.set_ylim(0.0, max(1e-9, min(bottom.max(), 3.0 * float(np.quantile(bottom, 0.9)))) * 1.05)
            axes.margins(x=0.01)
            axes.set_ylabel("seconds")
            drawing.legend_above(axes)
        figures.append(Figure("Learner, seconds a step", drawn.svg, wide=True))
    found = speeds(run_log)
    kinds = (
        ("generated", "generated", "blue"),
        ("updated", "trained, of the updates", "violet"),
        ("trained", "trained, of the whole step", "gray"),
    )
    tokens = [line_of(((of["step"], of[name]) for of in found), label, color) for name, label, color in kinds]
    mfu = [line_of(((of["step"], of["mfu"]) for of in found), "MFU", "teal")]
    title = "Response tokens a second"
    if svg := curve(title, tokens, log=True, floor=0.0, marks=marks):
        figures.append(Figure(title, svg))
    batches = run_log.of_kind("committed")
    uses = line_of(((event["batch"], number(event, "kv_use")) for event in batches), "in use", "green")
    hits = line_of(((event["batch"], number(event, "prefix_hits")) for event in batches), "prefix hits", "violet")
    shares = [
        (event["batch"], published / repeated)
        for event in batches
        if (repeated := number(event, "prefix_tokens")) and (published := number(event, "prefix_published")) is not None
    ]
    again = line_of(shares, "read again after a publish", "orange")
    title = "Keys and values of the engines"
    if svg := curve(title, [uses, hits, again], percent=True, floor=0.0, marks=marks):
        figures.append(Figure(title, svg))
    title = "Model FLOPs utilization (MFU)"
    if svg := curve(title, mfu, percent=True, floor=0.0, marks=marks):
        figures.append(Figure(title, svg))
    return why, figures


def speeds(run_log: RunLog) -> list[dict[str, Any]]:
    """Return each step's `generated`, `updated` and `trained`, response tokens a second, and `mfu`, or None."""
    committed = {event["batch"]: event for event in run_log.of_kind("committed")}
    ends = sorted(
        (started + spent, started, batch)
        for batch, event in committed.items()
        if (started := number(event, "started")) is not None
        and (spent := number(event.get("seconds") or {}, "generate")) is not None
    )
    before = [-math.inf, *(end for end, *_ in ends)]
    generating_s = {batch: end - max(started, last) for last, (end, started, batch) in zip(before, ends, strict=False)}
    noted = [event for event in run_log.of_kind("environment") if event["role"] == "learner"]
    found = []
    for line in run_log.metrics:
        step, seconds = line["step"], line.get("seconds") or {}
        machine = next((event for event in reversed(noted) if event["time"] <= line["time"]), {"ranks": None})
        phases = {phase: number(seconds, phase) or 0.0 for phase in seconds}
        mean, tokens = number(line, "response_tokens_mean"), number(line, "num_updated_tokens")
        sampled = mean * committed[step]["samples"] if mean is not None and step in committed else None
        facts = [number(machine, name) for name in ("active_parameters", "ranks", "peak_tflops")]
        model_tokens = number(line, "num_model_tokens")
        flops = peak_flops = None
        if model_tokens is not None and None not in facts:
            parameters, ranks, peak = (fact or 0.0 for fact in facts)
            flops, peak_flops = 6.0 * parameters * model_tokens, phases.get("update", 0.0) * ranks * peak * 1e12
        parts = dict(
            generated=(sampled, generating_s.get(step)),
            updated=(tokens, phases.get("logprobs", 0.0) + phases.get("update", 0.0)),
            trained=(tokens, sum(phases.values())),
            mfu=(flops, peak_flops),
        )
        rates = {name: None if above is None or not below else above / below for name, (above, below) in parts.items()}
        found.append(dict(step=step) | rates)
    return found

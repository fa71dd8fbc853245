"""The figures of a report about what is learned: held-out prompts, rewards, the optimizer."""

from __future__ import annotations

from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter

from pipeline.analysis.figures.drawing import COLORS, SMALL, WIDE, Named, curve, percent_label, render, steps_axis
from pipeline.analysis.pages.hover import add_values
from pipeline.analysis.run_log import RunLog, number

LEARNING_TEXT = (
    "Rest the pointer on a curve to read its value; open a line below a figure for what is healthy. Dotted lines mark "
    "the first step after a restart, or under a changed recipe."
)


LR = [("lr", "learning rate", "green")]


def sft_figures(run_log: RunLog) -> list[Named]:
    """What a run of supervised fine-tuning measures."""
    loss = [("loss", "loss", "blue"), ("held_out_loss", "held out", "orange")]
    return [
        ("Loss, nats a token", curve(run_log, "Loss, nats a token", loss)),
        ("Learning rate", curve(run_log, "Learning rate", LR, smooth=False)),
        ("Tokens learned, a step", curve(run_log, "Tokens learned", [("num_tokens", "tokens", "teal")], floor=0.0)),
        ("Entropy, nats a token", curve(run_log, "Entropy, nats a token", [("entropy", "entropy", "violet")])),
        ("Gradient norm", curve(run_log, "Gradient norm", [("grad_norm", "norm", "orange")], log=True)),
    ]


def learning_figures(run_log: RunLog) -> list[Named]:
    """What a step says of its batch and of its update."""
    reward = [("reward_mean", "mean reward", "blue"), ("solve_rate", "solved", "teal")]

    def one(title: str, metric: str, name: str, color: str, *, log: bool = False, percent: bool = False) -> Named:
        floor = 0.0 if percent else None
        return title, curve(run_log, title, [(metric, name, color)], log=log, percent=percent, floor=floor)

    return [
        ("Training reward", curve(run_log, "Training reward", reward)),
        one("Entropy, nats a token", "entropy", "entropy", "violet"),
        one("Gradient norm", "grad_norm", "norm", "orange", log=True),
        ("Learning rate", curve(run_log, "Learning rate", LR, smooth=False)),
        one("Response length, tokens", "response_tokens_mean", "mean", "teal"),
        one("Truncated responses", "truncated_share", "share", "pink", percent=True),
        one("Padding in micro-batches", "padding_share", "share", "gray", percent=True),
    ]


def held_out(run_log: RunLog, *, narrow: bool = False) -> str | None:
    """pass@1 with its 95 % interval, and pass@k for the largest k, by policy version; `narrow`: as a phone
    shows it whole."""
    events = [event for event in run_log.evaluations if number(event, "pass_at_1") is not None]
    if not events:
        return None
    versions = [int(event["version"]) for event in events]
    k = max((int(k) for event in events for k in event.get("pass_at_k") or {}), default=1)

    def draw(axes: Axes) -> None:
        low = [number(event, "pass_at_1_low") for event in events]
        high = [number(event, "pass_at_1_high") for event in events]
        if all(value is not None for value in (*low, *high)):
            if len(versions) == 1:
                axes.vlines(versions, low, high, color=COLORS["blue"], alpha=0.3, linewidth=5)  # type: ignore[arg-type]
            axes.fill_between(versions, low, high, color=COLORS["blue"], alpha=0.15, linewidth=0)  # type: ignore[arg-type]
        many = [(v, number(event.get("pass_at_k") or {}, str(k))) for v, event in zip(versions, events, strict=True)]
        known = [(v, value) for v, value in many if value is not None]
        if k > 1 and known:
            axes.plot(*zip(*known, strict=True), color=COLORS["teal"], marker="o", markersize=3, label=f"pass@{k}")
        first = [float(event["pass_at_1"]) for event in events]
        add_values(axes, versions, first, "pass@1", COLORS["blue"])
        axes.plot(versions, first, color=COLORS["blue"], marker="o", markersize=4, label="pass@1")
        axes.annotate(
            percent_label(round(first[-1], 3)),
            (versions[-1], first[-1]),
            (6, -3),
            textcoords="offset points",
            fontweight="bold",
        )
        steps_axis(axes, "policy version")
        axes.margins(x=0.07)
        axes.set_ylim(bottom=0.0)
        axes.yaxis.set_major_formatter(FuncFormatter(percent_label))
        axes.legend(loc="best")

    return render("held-out pass@1", SMALL, draw) if narrow else render("held-out pass@1 by version", WIDE, draw)

"""The figures of a report that depend on what was learned with: the advantage and its weight curves, the objective's
own measures, the correction's. Whatever of these a run has in its metrics is drawn; nothing asks for its name."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes

from pipeline.advantages import WeightCurves, weight_curves
from pipeline.analysis import figures
from pipeline.analysis.run_log import RunLog
from pipeline.config.algorithm import AdvantageSection, FADEAdvantage, PowerAdvantage

Named = tuple[str, str | None]
"""Title and <svg>, None without data."""


@dataclass(frozen=True)
class Measure:
    """A figure of metrics over steps; `lines` as in figures.curve."""

    title: str
    lines: tuple[tuple[str, str, str], ...]
    percent: bool = False
    log: bool = False
    floor: float | None = None

    def draw(self, history: RunLog) -> Named:
        """Title and figure."""
        svg = figures.curve(history, self.title, self.lines, percent=self.percent, log=self.log, floor=self.floor)
        return self.title, svg


FADE_MEASURES = (
    Measure("Alpha and delta", (("advantage_alpha", "alpha", "violet"), ("advantage_delta", "delta", "orange"))),
    Measure(
        "Solve rate, smoothed",
        (("solve_rate", "batch", "gray"), ("advantage_solve_rate", "p̂", "blue")),
        percent=True,
        floor=0.0,
    ),
    Measure(
        "Entropy, smoothed",
        (
            ("entropy", "batch", "gray"),
            ("advantage_entropy", "Ĥ", "blue"),
            ("advantage_target_entropy", "H*", "orange"),
        ),
    ),
)

OBJECTIVE_MEASURES = (
    Measure(
        "Clipped tokens",
        (
            ("clip_hits_high", "A > 0", "blue"),
            ("clip_hits_low", "A < 0", "orange"),
            ("dual_clip_hits", "A < 0, dual clip", "pink"),
        ),
        percent=True,
        floor=0.0,
    ),
    Measure("Tokens over the cap", (("cap_hits", "tokens", "orange"),), percent=True, floor=0.0),
    Measure("Mean weight", (("weight", "weight", "teal"),)),
    Measure(
        "Vetoed",
        (("veto_responses", "responses with a trigger", "gray"), ("veto_tokens", "tokens dropped", "orange")),
        percent=True,
        floor=0.0,
    ),
    Measure("Largest ratio where A < 0", (("ratio_max_negative", "ratio", "pink"),), log=True),
    Measure("Second moment of log-ratios", (("second_moment", "second moment", "violet"),), log=True),
    Measure("(log ratio)²", (("square", "mean", "violet"),), log=True),
    Measure("Parts of the loss", (("policy_loss", "policy", "blue"), ("kl_loss", "KL, weighted", "orange"))),
    Measure(
        "ESS that caps and anchors",
        (
            ("objective_ess", "used", "violet"),
            ("sampler_ess", "of the engine", "blue"),
            ("old_ess", "of the stage's start", "teal"),
        ),
    ),
)

CORRECTION_MEASURES = (
    Measure(
        "Tokens corrected",
        (
            ("correction_capped_positive", "capped, A > 0", "blue"),
            ("correction_capped_negative", "capped, A < 0", "orange"),
            ("correction_masked_positive", "dropped, A > 0", "blue"),
            ("correction_masked_negative", "dropped, A < 0", "orange"),
        ),
        percent=True,
        floor=0.0,
    ),
    Measure("Mean factor of the correction", (("correction_factor", "factor", "teal"),)),
)

NUM_POINTS = 201
"""Solve rates at which weight_curves are drawn."""


def advantage_figures(history: RunLog) -> list[Named]:
    """What the advantage weighs, and how that moved."""
    schedule = FADE_MEASURES if isinstance(history.recipe.advantage, FADEAdvantage) else ()
    return [("Weight by solve rate", weight_curve_points(history)), *(measure.draw(history) for measure in schedule)]


def objective_figures(history: RunLog) -> list[Named]:
    """What the objective clipped, capped, vetoed and anchored to, and what the correction took away."""
    return [measure.draw(history) for measure in (*OBJECTIVE_MEASURES, *CORRECTION_MEASURES)]


def advantage_text(history: RunLog) -> str:
    """What the dashed and the full lines of the weight_curves are."""
    when = ", at the newest alpha and delta" if isinstance(history.recipe.advantage, FADEAdvantage) else ""
    return (
        f"How much weight {history.recipe.advantage.name} gives a prompt by its solve rate, before any normalization"
        f"{when}: full lines for very large groups, dashed for groups of {history.recipe.rollout.group_size}."
    )


def weight_curve_points(history: RunLog) -> str | None:
    """m_S and m_F over the solve rate of a prompt; one line where they are the same. None before the first step."""
    if not history.metrics:
        return None
    section, group_size = present_section(history), history.recipe.rollout.group_size
    p = np.linspace(0.0, 1.0, NUM_POINTS)
    infinite, finite = weight_curves(section, p), weight_curves(section, p, group_size=group_size)

    def draw(axes: Axes) -> None:
        _draw_weight_curves(axes, finite, dashed=True)
        _draw_weight_curves(axes, infinite, dashed=False)
        axes.set_xlabel("solve rate of a prompt")
        axes.set_xlim(0.0, 1.0)
        axes.set_ylim(bottom=0.0)
        axes.legend(loc="best", fontsize=8)

    return figures.render("weight_curves", figures.SMALL, draw)


def present_section(history: RunLog) -> AdvantageSection:
    """The recipe's advantage; FADE as the Power that it was last."""
    section = history.recipe.advantage
    alpha, delta = history.last("advantage_alpha"), history.last("advantage_delta")
    if isinstance(section, FADEAdvantage) and alpha is not None and delta is not None:
        return PowerAdvantage(name="power", alpha=alpha, delta=delta)
    return section


def _draw_weight_curves(axes: Axes, found: WeightCurves, *, dashed: bool) -> None:
    style: dict[str, object] = dict(linestyle="--", linewidth=1.0, alpha=0.7) if dashed else {}
    same = np.allclose(found.success, found.failure)
    lines = (
        [("both", found.success, "violet")]
        if same
        else [
            ("successes", found.success, "blue"),
            ("failures", found.failure, "orange"),
        ]
    )
    for label, mass, color in lines:
        axes.plot(found.p, mass, color=figures.COLOURS[color], label="" if dashed else label, **style)  # type: ignore[arg-type]

"""The figures of a report that depend on what was learned with: the advantage and its weight curves, and whatever the
objective, the correction and the advantage say that they measure."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from matplotlib.axes import Axes

from pipeline.advantages.methods import WeightCurves, binomial_weight_curves, weight_curves
from pipeline.analysis.figures import drawing
from pipeline.analysis.figures.drawing import Named
from pipeline.analysis.run_log import RunLog
from precision.settings import Measure

KL_TO_REFERENCE = Measure("KL to the reference, nats a token", (("kl_to_reference", "k3", "violet"),), floor=0.0)
"""Of a run with `reference`."""

NUM_POINTS = 201
"""Solve rates at which weight_curves are drawn."""


def advantage_figures(run_log: RunLog) -> list[Named]:
    """What the advantage weighs, and how that moved; nothing where a teacher judges alone, whose weights are those of
    tokens."""
    distillation = run_log.recipe.distillation
    if distillation is not None and distillation.judges_alone:
        return []
    drawn = _drawn(run_log, run_log.recipe.advantage.measures)
    return [("Weight by solve rate", weight_curve_points(run_log)), *drawn]


def objective_figures(run_log: RunLog) -> list[Named]:
    """What the objective clipped, capped, vetoed and anchored to, and what the correction took away."""
    own = (*run_log.recipe.objective.measures, *run_log.recipe.correction.measures)
    return _drawn(run_log, (*own, KL_TO_REFERENCE))


def _drawn(run_log: RunLog, measures: Iterable[Measure]) -> list[Named]:
    return [
        (m.title, drawing.curve(run_log, m.title, m.lines, percent=m.percent, log=m.log, floor=m.floor))
        for m in measures
    ]


def advantage_text(run_log: RunLog) -> str:
    """What the dashed and the full lines of the weight curves are."""
    advantage, group_size = run_log.recipe.advantage, run_log.recipe.rollout.group_size
    when = f", at the newest {' and '.join(advantage.moving_parts)}" if advantage.moving_parts else ""
    return (
        f"How much weight {advantage.name} gives a prompt by its solve rate, before any normalization{when}: full "
        f"lines for very large groups, dashed for groups of {group_size}."
    )


def weight_curve_points(run_log: RunLog) -> str | None:
    """m_S and m_F over the solve rate of a prompt; one line where they are the same. None before the first step."""
    if not run_log.metrics:
        return None
    advantage, group_size = run_log.recipe.advantage.at_last(run_log.last), run_log.recipe.rollout.group_size
    p = np.linspace(0.0, 1.0, NUM_POINTS)
    infinite, finite = weight_curves(advantage, p), binomial_weight_curves(advantage, p, group_size)

    def draw(axes: Axes) -> None:
        _draw_weight_curves(axes, finite, dashed=infinite is not None)
        if infinite is not None:
            _draw_weight_curves(axes, infinite, dashed=False)
        axes.set_xlabel("solve rate of a prompt")
        axes.set_xlim(0.0, 1.0)
        axes.set_ylim(bottom=0.0)
        axes.legend(loc="best", fontsize=8)

    return drawing.render("weight_curves", drawing.SMALL, draw)


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
    for label, weight, color in lines:
        axes.plot(found.p, weight, color=drawing.COLORS[color], label="" if dashed else label, **style)  # type: ignore[arg-type]

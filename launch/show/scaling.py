"""The `evenkeel scaling` commands: what a run will reach with more compute, and which of two recipes scales better."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from launch.terminal import AsJson, emit

if TYPE_CHECKING:
    from pipeline.analysis.scaling.report import Bounds

scaling_app = typer.Typer(
    help="Fit, forecast and compare RL scaling curves as ScaleRL does (arXiv 2510.13786).\n\n"
    "R_C = R_0 + (A - R_0) / (1 + (C_mid / C)^B): A is what unlimited compute reaches, C_mid where half of the rise is "
    "done, B how steep it is. A curve whose points end below C_mid cannot tell A; the commands say so.",
    no_args_is_help=True,
)

Sources = Annotated[
    list[Path], typer.Argument(help="Run directories or JSONL files (these need --x and --y).", show_default=False)
]
X = Annotated[
    str | None, typer.Option("--x", metavar="FIELD", help="Compute. A run: samples (default), tokens or hours.")
]
Y = Annotated[
    str | None, typer.Option("--y", metavar="FIELD", help="Score. A run: a field of its evaluations, pass_at_1.")
]
R0 = Annotated[
    float | None,
    typer.Option("--r0", help="R_0, taken as exact. Default: the point of least compute, with the noise of a point."),
]
Skip = Annotated[float, typer.Option(min=0.0, help="Leave out points below this compute (ScaleRL: the first epoch).")]
AMin = Annotated[float | None, typer.Option(help="Grid of A in steps of .005. Default: above R_0; paper: .45.")]
AMax = Annotated[float, typer.Option(help="End of the grid of A; paper: .8.")]
CMidMin = Annotated[float | None, typer.Option(help="Grid of 100 C_mid. Default: 1/50 of the last C; paper: 100.")]
CMidMax = Annotated[float | None, typer.Option(help="End of that grid. Default: twice the last C; paper: 40000.")]
Plot = Annotated[Path | None, typer.Option(help="Also draw the curves into this .png or .svg file.")]


@scaling_app.command("fit")
def fit_command(
    sources: Sources,
    x: X = None,
    y: Y = None,
    r0: R0 = None,
    skip: Skip = 0.0,
    a_min: AMin = None,
    a_max: AMax = 1.0,
    c_mid_min: CMidMin = None,
    c_mid_max: CMidMax = None,
    plot: Plot = None,
    as_json: AsJson = False,
) -> None:
    """Fit one curve: A, B and C_mid with 95 % profile-likelihood intervals, and whether A is known at all.

    Several sources are repeats of one setting (seeds, say): their points are fitted jointly, and A of each alone is
    listed, since its spread holds what residuals cannot show. To set settings against one another use `compare`.

    Grid and SciPy refinement as in the paper's appendix A.5; the ranges of the grid come from the data unless given.
    How far to train: with points good to ±.01, A is good to .02 from about 100 of them up to 2 × C_mid (400 when B is
    near 1), or 70 up to 4 × C_mid.

    Example: `evenkeel scaling fit runs/demo --x tokens --plot demo.png`
    """
    from pipeline.analysis.scaling.report import fit_report

    report = fit_report(sources, x, y, _bounds(r0, skip, a_min, a_max, c_mid_min, c_mid_max), plot_path=plot)
    _show(report, as_json)


@scaling_app.command("forecast")
def forecast_command(
    sources: Sources,
    at: Annotated[
        list[float], typer.Option(min=0.0, help="Compute to forecast for; repeat at will.", show_default=False)
    ],
    x: X = None,
    y: Y = None,
    r0: R0 = None,
    skip: Skip = 0.0,
    a_min: AMin = None,
    a_max: AMax = 1.0,
    c_mid_min: CMidMin = None,
    c_mid_max: CMidMax = None,
    plot: Plot = None,
    as_json: AsJson = False,
) -> None:
    """Fit as `fit` does, and say what the score will be at other amounts of compute, with a 95 % interval.

    The interval is that of the curve (profile likelihood): a single new evaluation adds its own noise.

    Example: `evenkeel scaling forecast runs/demo --at 50000 --at 100000`
    """
    from pipeline.analysis.scaling.report import fit_report

    bounds = _bounds(r0, skip, a_min, a_max, c_mid_min, c_mid_max)
    _show(fit_report(sources, x, y, bounds, at=at, plot_path=plot), as_json)


@scaling_app.command("compare")
def compare_command(
    sources: Sources,
    x: X = None,
    y: Y = None,
    r0: R0 = None,
    skip: Skip = 0.0,
    a_min: AMin = None,
    a_max: AMax = 1.0,
    c_mid_min: CMidMin = None,
    c_mid_max: CMidMax = None,
    common_a: Annotated[
        float | None, typer.Option(help="A of the refit. Default: the A that fits all of them best together.")
    ] = None,
    plot: Plot = None,
    as_json: AsJson = False,
) -> None:
    """Fit each source alone, then all at one common A.

    B and C_mid of different curves can be compared only at the same A (appendix A.5): a lower A makes a curve look
    steeper. Asymptotes closer than .02 are the same, as repeats of one run differ by that much.

    Example: `evenkeel scaling compare runs/p3o runs/grpo --x hours`
    """
    from pipeline.analysis.scaling.report import compare_report

    bounds = _bounds(r0, skip, a_min, a_max, c_mid_min, c_mid_max)
    _show(compare_report(sources, x, y, bounds, common_a=common_a, plot_path=plot), as_json)


def _bounds(
    r0: float | None,
    skip: float,
    a_min: float | None,
    a_max: float,
    c_mid_min: float | None,
    c_mid_max: float | None,
) -> Bounds:
    from pipeline.analysis.scaling.report import Bounds

    return Bounds(r0=r0, skip=skip, a_min=a_min, a_max=a_max, c_mid_min=c_mid_min, c_mid_max=c_mid_max)


def _show(report: dict[str, Any], as_json: bool) -> None:
    """One JSON line, or tables and warnings."""
    if as_json:
        emit(report)
        return
    from rich.console import Console

    console = Console()
    for table in _tables(report):
        console.print(table)
    for warning in _warnings(report):
        console.print(f"[yellow]![/yellow] {warning}", highlight=False)


def _tables(report: dict[str, Any]) -> list[Any]:
    from rich.table import Table

    fits = report.get("runs_fitted") or [report]
    own = Table("curve", "points", "R_0", "A", "B", "C_mid", "noise", "A known", box=None)
    for fit in fits:
        own.add_row(
            ", ".join(fit["runs"]),
            str(fit["num_points"]),
            f"{fit['R_0']:.3f}",
            *(_with_interval(fit, key) for key in ("A", "B", "C_mid")),
            f"{fit['residual_std']:.4f}",
            "yes" if fit["identifiable"] else "no",
        )
    tables = [own]
    if "common_A" in report:
        common = Table("curve", "B", "C_mid", "noise", box=None, title=f"at A = {report['common_A']:.3f}")
        for fit in fits:
            refit = fit["at_common_A"]
            row = (_with_interval(refit, "B"), _with_interval(refit, "C_mid"), f"{refit['residual_std']:.4f}")
            common.add_row(", ".join(fit["runs"]), *row)
        tables.append(common)
    if "forecasts" in report:
        forecasts = Table(report["x"], report["y"], "95 %", "", box=None)
        for one in report["forecasts"]:
            low, high = one["R_interval"]
            beyond = "beyond the data" if one["extrapolated"] else ""
            forecasts.add_row(f"{one['C']:g}", f"{one['R']:.3f}", f"{low:.3f} to {high:.3f}", beyond)
        tables.append(forecasts)
    return tables


def _with_interval(fit: dict[str, Any], key: str) -> str:
    digits = {"A": ".3f", "B": ".2f", "C_mid": ".4g"}[key]
    low, high = fit[f"{key}_interval"]
    return f"{fit[key]:{digits}} ({low:{digits}} to {high:{digits}})"


def _warnings(report: dict[str, Any]) -> list[str]:
    fits = report.get("runs_fitted") or [report]
    named = [f"{', '.join(fit['runs'])}: {text}" if len(fits) > 1 else text for fit in fits for text in fit["warnings"]]
    return named + (report["warnings"] if "runs_fitted" in report else [])

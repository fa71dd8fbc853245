"""The commands that look at runs: `evenkeel runs`, `trajectories`, `scaling` and `trace`."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from launch.terminal import AsJson, emit
from pipeline.errors import RecipeError

if TYPE_CHECKING:
    from pipeline.analysis.scaling import Bounds

runs_app = typer.Typer(help="Look at runs.", no_args_is_help=True)


@runs_app.command("show")
def runs_show(
    run: Annotated[Path, typer.Argument(help="Run directory, for example runs/demo.", show_default=False)],
    as_json: AsJson = False,
) -> None:
    """Print what a run has reached: pass@1 first and last, steps, wall time, layout, precision."""
    from launch.show.runs import print_summary
    from pipeline.analysis.summary import summary

    result = summary(run)
    if as_json:
        emit(result)
    else:
        print_summary(result)


@runs_app.command("list")
def runs_list(
    folder: Annotated[Path, typer.Argument(help="Folder that holds runs.")] = Path("runs"),
    as_json: AsJson = False,
) -> None:
    """List the runs of a folder: state, steps, held-out pass@1, training reward, wall time.

    A run that cannot be read has its reason in its row and hides no other.
    """
    from pipeline.analysis.summary import list_runs

    found = list_runs(folder)
    if as_json:
        emit(dict(folder=str(folder), runs=found))
        return
    from rich.console import Console

    from launch.show.runs import render_list

    Console().print(render_list(folder, found))


@runs_app.command("compare")
def runs_compare(
    runs: Annotated[list[Path], typer.Argument(help="Run directories, two or more.", show_default=False)],
    html: Annotated[
        Path | None, typer.Option(help="Write a page with curves over steps, samples and seconds.", show_default=False)
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Print the headline numbers of several runs side by side, and the recipe keys in which they differ.

    A row in which all runs say the same is left out of the table; --json has every number.
    """
    from pipeline.analysis.comparison import compare_runs

    result = compare_runs(runs, html)
    if as_json:
        emit(result)
        return
    from rich.console import Console

    from launch.show.runs import render_comparison

    Console().print(render_comparison(result))
    if html is not None:
        print(f"page: {html}")


def trace(
    run: Annotated[Path, typer.Argument(help="Run directory, for example runs/demo.", show_default=False)],
    steps: Annotated[
        str | None, typer.Option(metavar="A:B", help="Steps A to B, without B. Default: the last 20.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="File to write. Default: RUN/trace.json.", show_default=False)
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Write what every process did when, as a trace for https://ui.perfetto.dev (or chrome://tracing).

    Reads the run directory alone, during a run or after it: learner ranks and their phases, publishes, the collector's
    batches, each engine's requests and weight updates, verifiers. The page that shows it keeps it on your machine.
    """
    from pipeline.analysis.trace import trace as trace_of
    from pipeline.data.files import write_atomically

    found = trace_of(run, None if steps is None else _steps(steps))
    path = run / "trace.json" if out is None else out
    write_atomically(path, json.dumps(found) + "\n")
    about, spans = found["otherData"], sum(event["ph"] == "X" for event in found["traceEvents"])
    for sentence in about["damage"]:
        print(f"warning: {sentence}", file=sys.stderr)
    if as_json:
        emit(dict(file=str(path), spans=spans, **about))
    else:
        print(f"{path}: {spans} spans of steps {about['steps'][0]}:{about['steps'][1]}; open it at ui.perfetto.dev")
        print(about["bottleneck"])


def _steps(text: str) -> tuple[int, int]:
    """Return A and B of A:B."""
    if re.fullmatch(r"\d{1,9}:\d{1,9}", text) is None:
        raise RecipeError(f"--steps is {text!r}, expected A:B, for example 10:12 for steps 10 and 11")
    first, end = map(int, text.split(":"))
    return first, end


trajectories_app = typer.Typer(help="Read what was sampled.", no_args_is_help=True)
RunPath = Annotated[Path, typer.Argument(help="Run directory, for example runs/demo.", show_default=False)]


@trajectories_app.command("show")
def trajectories_show(
    run: RunPath,
    batch: Annotated[int, typer.Argument(help="Batch index.", min=0, show_default=False)],
    limit: Annotated[int, typer.Option(min=1, help="Samples to print.")] = 8,
    as_json: AsJson = False,
) -> None:
    """Print prompts, completions, rewards and the logprob gap of each token of one batch.

    With --json: text, reward and log-ratio of each sample, without the single tokens.
    """
    from launch.show.trajectories import as_mapping, show

    if as_json:
        emit(as_mapping(run, batch, limit))
    else:
        show(run, batch, limit)


@trajectories_app.command("export")
def trajectories_export(
    run: RunPath,
    parquet: Annotated[Path | None, typer.Option(help="Parquet file to write.", show_default=False)] = None,
    jsonl: Annotated[Path | None, typer.Option(help="JSON Lines file to write.", show_default=False)] = None,
    steps: Annotated[
        str | None, typer.Option(metavar="A:B", help="Steps A to B - 1; default: all.", show_default=False)
    ] = None,
    reward_min: Annotated[float | None, typer.Option(help="Lowest reward to keep.", show_default=False)] = None,
    reward_max: Annotated[float | None, typer.Option(help="Highest reward to keep.", show_default=False)] = None,
    search: Annotated[
        str | None, typer.Option(help="Keep samples with this text in prompt or response.", show_default=False)
    ] = None,
    finish: Annotated[
        Literal["stop", "length"] | None,
        typer.Option(help="Keep samples that ended so: by themselves, or at the limit of tokens.", show_default=False),
    ] = None,
    source: Annotated[
        str | None, typer.Option(metavar="NAME", help="Keep samples of this one of task.sources.", show_default=False)
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Write samples as Parquet or JSON Lines: prompt and response as text, reward and its parts, versions, log-ratios.

    One row a sample, in the order of the steps; a limit on rewards leaves out samples that have none. Files that are
    there are replaced.

    For example:  evenkeel trajectories export runs/demo --jsonl wrong.jsonl --steps 90:100 --reward-max 0
    """
    from launch.show.trajectories import Filter, export

    if (parquet is None) == (jsonl is None):
        raise RecipeError("give one of --parquet FILE and --jsonl FILE")
    first, end = (None, None) if steps is None else _steps(steps)
    chosen = Filter(
        first=first, end=end, reward_min=reward_min, reward_max=reward_max, search=search, finish=finish, source=source
    )
    result = export(run, parquet=parquet, jsonl=jsonl, chosen=chosen)
    if as_json:
        emit(result)
    else:
        print(f"{result['path']}: {result['samples']} of {result['read']} samples of {result['batches']} batches")


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
    from pipeline.analysis.scaling import fit_report

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
    from pipeline.analysis.scaling import fit_report

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
    from pipeline.analysis.scaling import compare_report

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
    from pipeline.analysis.scaling import Bounds

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

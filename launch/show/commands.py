"""Define the commands that read runs: `runs`, `trajectories`, `scaling`, `trace`, `export`, `fork` and `plugins`."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Literal

import typer

from launch.terminal import AsJson, Overrides, emit
from pipeline.errors import RecipeError

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
    """Return A and B of a text A:B. Raises RecipeError."""
    if re.fullmatch(r"\d{1,9}:\d{1,9}", text) is None:
        raise RecipeError(f"--steps is {text!r}, expected A:B, for example 10:12 for steps 10 and 11")
    first, end = map(int, text.split(":"))
    return first, end


trajectories_app = typer.Typer(help="Read the sampled responses.", no_args_is_help=True)
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
    file: Annotated[Path, typer.Argument(help="File to write, .jsonl or .parquet.", show_default=False)],
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
        str | None, typer.Option(metavar="NAME", help="Only samples of this source (task.sources).", show_default=False)
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Write samples as Parquet or JSON Lines: prompt and response as text, reward and its parts, versions, log-ratios.

    One row a sample, in the order of the steps; a limit on rewards leaves out samples that have none. A file that is
    there is replaced.

    For example:  evenkeel trajectories export runs/demo wrong.jsonl --steps 90:100 --reward-max 0
    """
    from launch.show.trajectories import export

    if file.suffix not in (".jsonl", ".parquet"):
        raise RecipeError(f"{file} ends in {file.suffix or 'nothing'!r}, expected .jsonl or .parquet")
    first, end = (0, None) if steps is None else _steps(steps)
    kept = dict(reward_min=reward_min, reward_max=reward_max, search=search, finish=finish, source=source)
    result = export(run, file, first=first, end=end, **kept)  # type: ignore[arg-type]
    if as_json:
        emit(result)
    else:
        print(f"{result['path']}: {result['samples']} of {result['read']} samples of {result['batches']} batches")


def scaling(
    sources: Annotated[
        list[Path], typer.Argument(help="Run directories or JSONL files (these need --x and --y).", show_default=False)
    ],
    compare: Annotated[
        bool,
        typer.Option("--compare", help="Fit each source alone, then all with a common A. Default: they are repeats."),
    ] = False,
    at: Annotated[
        list[float] | None, typer.Option(min=0.0, help="Compute to forecast for; repeat at will.", show_default=False)
    ] = None,
    x: Annotated[
        str | None, typer.Option("--x", metavar="FIELD", help="Compute. A run: samples (default), tokens or hours.")
    ] = None,
    y: Annotated[
        str | None, typer.Option("--y", metavar="FIELD", help="Score. A run: a field of its evaluations, pass_at_1.")
    ] = None,
    r0: Annotated[
        float | None, typer.Option("--r0", help="R_0, taken as exact. Default: the point of least compute.")
    ] = None,
    skip: Annotated[float, typer.Option(min=0.0, help="Leave out points below this compute.")] = 0.0,
    a_min: Annotated[
        float | None, typer.Option(help="Grid of A in steps of .005. Default: above R_0; paper: .45.")
    ] = None,
    a_max: Annotated[float, typer.Option(help="End of the grid of A; paper: .8.")] = 1.0,
    c_mid_min: Annotated[
        float | None, typer.Option(help="Grid of 100 C_mid. Default: 1/50 of the last C; paper: 100.")
    ] = None,
    c_mid_max: Annotated[
        float | None, typer.Option(help="End of that grid. Default: twice the last C; paper: 40000.")
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="Also draw the curves into this .png or .svg file.")] = None,
    as_json: AsJson = False,
) -> None:
    """Fit RL scaling curves as ScaleRL does (arXiv 2510.13786, appendix A.5), forecast from them, and compare them.

    R_C = R_0 + (A - R_0) / (1 + (C_mid / C)^B): A is what unlimited compute reaches, C_mid where half of the rise is
    done, B how steep it is; each with a 95 % profile-likelihood interval. A curve whose points end below C_mid cannot
    tell A, and the command says so: with points good to ±.01, A is good to .02 from about 100 of them up to 2 × C_mid.

    Several sources are repeats of one setting (seeds, say), and fitted jointly; with --compare they are different ones.
    B and C_mid of different curves can be compared only at the same A: a lower A makes a curve look steeper.

    For example:  evenkeel scaling runs/demo --x tokens --at 50000 --plot demo.png
    """
    from rich.console import Console

    from launch.show.runs import tables, warnings
    from pipeline.analysis.scaling import Bounds, compare_report, fit_report

    bounds = Bounds(r0=r0, skip=skip, a_min=a_min, a_max=a_max, c_mid_min=c_mid_min, c_mid_max=c_mid_max)
    if compare and at:
        raise RecipeError("--at belongs to a fit; leave out --compare")
    if compare:
        report = compare_report(sources, x, y, bounds, plot_path=plot)
    else:
        report = fit_report(sources, x, y, bounds, at=at or (), plot_path=plot)
    if as_json:
        emit(report)
        return
    console = Console()
    for table in tables(report):
        console.print(table)
    for warning in warnings(report):
        console.print(f"[yellow]![/yellow] {warning}", highlight=False)


def export(
    run: Annotated[Path, typer.Argument(help="Run directory, for example runs/demo.", show_default=False)],
    to: Annotated[str, typer.Option(help="tensorboard or wandb.", show_default=False)],
    out: Annotated[
        Path | None, typer.Option(help="Folder to write; default: RUN/exports/TOOL.", show_default=False)
    ] = None,
    follow: Annotated[bool, typer.Option("--follow", help="Go on until the run is finished.")] = False,
    as_json: AsJson = False,
) -> None:
    """Write a run's metrics for another tool: TensorBoard's event files, or an offline run of Weights & Biases.

    A process of its own, which reads the run directory and opens no connection; the run does not know of it. Call it
    again whenever you like: every step is there once, also after a kill, and a step that a resume trained again is
    there as it was trained last. It needs the tool's package, and says how to install it.

    For example:  evenkeel export runs/demo --to tensorboard --follow
    """
    from launch.export.export import export as write_points

    result = write_points(run, to, out, follow=follow)
    if as_json:
        emit(result)
        return
    print(f"{result['path']}: {result['steps']} steps, {result['versions']} evaluations")
    print(result["next"])


def fork(
    run: Annotated[Path, typer.Argument(help="Run directory that has the checkpoint.", show_default=False)],
    new: Annotated[Path, typer.Argument(help="Run directory to make; a name alone: beside RUN.", show_default=False)],
    at: Annotated[int, typer.Option(min=1, help="Step of the checkpoint to go on from.", show_default=False)],
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """Make a new run from a checkpoint of an old one, where keys may change that a resume may not.

    The new run has the weights, the optimizer's state, the batches and the records of the first STEP steps, linked
    where the file system can and each compared with its checksum. Later batches stay behind. RUN is not changed.
    """
    from launch.fork.fork import fork_run

    made = fork_run(run, new, at, overrides or [])
    if as_json:
        emit(made)
    else:
        print(f"{made['run']} begins at step {at} of {run}; go on with `evenkeel train {made['recipe']}`")


def plugins(
    modules: Annotated[
        list[str] | None, typer.Argument(help="Modules of your own, such as mypackage.rewards.", show_default=False)
    ] = None,
    as_json: AsJson = False,
) -> None:
    """List what a recipe can name: objectives, corrections, advantages, tasks, rewards, filters of rows and of groups.

    Without a module: what comes with Even Keel, and what one of your own would have to be. With modules: what they
    define, as a recipe names it, and what a class still lacks. A module is imported, from the working folder too.

    For example:  evenkeel plugins my_rewards
    """
    from launch.plugins.listing import ASKED, key_of, of_modules, shipped

    found = of_modules(modules) if modules else shipped()
    if as_json:
        emit(dict(plugins=[asdict(plugin) for plugin in found], own=ASKED))
        return
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False)
    for heading in ("recipe key", "value", "what it is"):
        table.add_column(heading, overflow="fold")
    for plugin in found:
        table.add_row(plugin.key, Text(plugin.value), Text(f"NOT YET: {plugin.lacks}" if plugin.lacks else plugin.says))
    if not modules:
        table.add_section()
        for kind, asked in ASKED.items():
            table.add_row(key_of(kind), "package.module:Name", Text(f"yours: {asked}"))
    Console().print(table)

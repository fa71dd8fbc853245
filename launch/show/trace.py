"""The `evenkeel trace` command."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Annotated

import typer

from launch.terminal import AsJson, emit
from pipeline.errors import RecipeError


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
    from pipeline.analysis.flight.trace import trace as trace_of
    from pipeline.data.files import write_atomically

    if steps is not None and re.fullmatch(r"\d{1,9}:\d{1,9}", steps) is None:
        raise RecipeError(f"--steps is {steps!r}, expected A:B, for example 10:12 for steps 10 and 11")
    first, last = (None, None) if steps is None else map(int, steps.split(":"))
    found = trace_of(run, None if first is None or last is None else (first, last))
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

"""Define the `evenkeel quant-map` commands. Each imports its modules when it runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from launch.terminal import AsJson, Overrides, emit, going_on

quant_map_app = typer.Typer(help="Which layers the engines hold in FP8, and which not.", no_args_is_help=True)


@quant_map_app.command("suggest")
def suggest_command(
    source: Annotated[
        Path,
        typer.Argument(help="Recipe, run directory (scores its samples) or HF model folder.", show_default=False),
    ],
    out: Annotated[Path | None, typer.Option(help="YAML file to write, for rollout.quant_map.")] = None,
    ess_floor: Annotated[float, typer.Option(min=0.01, max=0.9999, help="Token ESS that the map must hold.")] = 0.98,
    format_: Annotated[
        Literal["fp8_block", "fp8_tensor"] | None,
        typer.Option("--format", help="Format to start from; default: the recipe's, else fp8_block."),
    ] = None,
    rows: Annotated[
        int, typer.Option(min=2, max=2**16, help="Samples; those of every other prompt are held out.")
    ] = 32,
    row_tokens: Annotated[
        int, typer.Option(min=8, max=2**20, help="Tokens of a response that are scored, at most.")
    ] = 256,
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """Find the layers that FP8 hurts most, and promote them until the ESS reaches the floor.

    The learner scores the same responses without quantization, and with each group of layers (qkv, o, gate_up, down;
    all experts of a layer) quantized alone: its KL is the damage of that group. Groups are then promoted in the order
    of damage a byte. After each promotion the whole map is scored on prompts that are held out, and the path is shown.
    Formats are emulated, so no engine and no GPU is needed. A run is scored at its newest checkpoint, on its newest
    batch; a recipe or a model on responses that transformers samples from the model.

    Exits 1 when the floor is not held even with nothing quantized.

    Example: `evenkeel quant-map suggest runs/demo --ess-floor 0.995 --out demo-map.yaml`
    """
    from launch.quant_map.suggest import print_suggestion, suggest

    with going_on("the learner ranks its modules"):
        result = suggest(
            source,
            out,
            ess_floor=ess_floor,
            precision=format_,
            num_rows=rows,
            row_tokens=row_tokens,
            overrides=overrides or [],
        )
    if as_json:
        emit(result)
    else:
        print_suggestion(result)
    raise typer.Exit(0 if result["reached"] else 1)


@quant_map_app.command("show")
def show_command(
    file: Annotated[Path, typer.Argument(help="Quant map, such as RUN/policy/000000/quant_map.yaml.")],
    model: Annotated[
        Path | None, typer.Option(help="HF folder: checks the names and counts bytes.", show_default=False)
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Print a quant map: its base format and its exceptions, and with --model what it costs.

    Example: `evenkeel quant-map show demo-map.yaml --model models/demo`
    """
    from launch.quant_map.suggest import print_map, read_map

    result = read_map(file, model)
    if as_json:
        emit(result)
    else:
        print_map(result)

"""Quant maps and suggestions as tables for people."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from pipeline.errors import RecipeError
from precision.formats.quant_map_file import QuantMapFile

SHOWN = 12
"""Groups of a ranking."""


def read_map(file: Path, model: Path | None) -> dict[str, Any]:
    """base, exceptions and, with a model, quantized_bytes and full_bytes of its linear layers (full: as stored in
    BF16). Raises RecipeError when the file does not say a map or names what the model does not have."""
    try:
        said = QuantMapFile.read(file)
        result: dict[str, Any] = dict(base=said.base, exceptions=dict(said.exceptions))
        return result if model is None else result | _sizes(said, model)
    except ValueError as error:
        raise RecipeError(str(error)) from error


def _sizes(said: QuantMapFile, model: Path) -> dict[str, Any]:
    from megatron_bridge.hf.model_config import ModelConfig, read_hf_config
    from precision.formats.quant_map import QuantMap

    config = ModelConfig.from_hf(read_hf_config(model))
    quant = QuantMap.from_file(said, config.num_layers, None if config.experts is None else config.experts.count)
    shapes = config.tensors()
    counts = {module: math.prod(shapes[f"{module}.weight"]) for group in quant.fused_groups for module in group}
    quantized = sum(count for module, count in counts.items() if module in quant.formats)
    whole = sum(counts.values())
    return dict(
        quantized_share=quantized / whole,
        linear_bytes=quantized + 2 * (whole - quantized),
        linear_bytes_in_bf16=2 * whole,
    )


def print_map(result: dict[str, Any]) -> None:
    """One line a fact and an exception."""
    print(f"base: {result['base']}")
    for module, name in result["exceptions"].items():
        print(f"  {module}: {name}")
    if "quantized_share" in result:
        gib = 2.0**30
        print(
            f"{result['quantized_share']:.1%} of the linear weights are quantized: {result['linear_bytes'] / gib:.3f} "
            f"GiB, {result['linear_bytes_in_bf16'] / gib:.3f} in BF16"
        )


def print_suggestion(result: dict[str, Any]) -> None:
    """The ranking, the path, and what came of it."""
    from rich.console import Console
    from rich.table import Table

    console = Console()
    theirs = {one["group"]: place for place, one in enumerate(result.get("modelopt", {}).get("ranking", []), start=1)}
    table = Table(title="Each group: KL (nats) and ESS when it alone is quantized; ESS without it", box=None)
    # The names fill what 80 columns leave.
    for title in ("group", "KL", "ESS", "ESS without", "MiB more", *(["ModelOpt"] * bool(theirs))):
        table.add_column(title, justify="left" if title == "group" else "right", no_wrap=True)
    for one in result["ranking"][:SHOWN]:
        cells = [f"{one['damage']:.1e}", f"{one['alone']['ess']:.5f}", f"{one['promoted']['ess']:.5f}"]
        cells += [f"{one['extra_bytes'] / 2**20:.2f}"] + ([str(theirs[one["group"]])] if theirs else [])
        table.add_row(one["group"].removeprefix("model."), *cells)
    console.print(table)
    left = len(result["ranking"]) - SHOWN
    if left > 0:
        console.print(f"… and {left} more groups")
    if theirs:
        console.print(f"rank correlation with ModelOpt's auto_quantize: {result['modelopt']['agreement']:.2f}")
    path = Table(title=f"Promotions, on {result['start']['num_tokens']} held-out tokens", box=None)
    for title in ("promoted", "ESS", "KL, nats", "MiB more in all"):
        path.add_column(title, justify="left" if title == "promoted" else "right")
    path.add_row("–", f"{result['start']['ess']:.5f}", f"{result['start']['k3']:.2e}", "0")
    total = 0
    for step in result["path"]:
        total += step["extra_bytes"]
        path.add_row(
            step["group"].removeprefix("model."), f"{step['ess']:.5f}", f"{step['k3']:.2e}", f"{total / 2**20:.2f}"
        )
    console.print(path)
    verdict = "holds" if result["reached"] else "does not hold"
    console.print(f"The map {verdict} an ESS of {result['ess_floor']:g}: {result['gap']['ess']:.5f}.")
    if result["out"] is not None:
        console.print(f"rollout.quant_map: {result['out']}")

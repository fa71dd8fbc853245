"""Run `evenkeel verify layouts`: check that the learner computes the same numbers in every parallel layout.

    one process, one micro-batch ──three steps──▶ log-probabilities, loss, gradient norm, ESS, change of every weight
    each layout ─────────────────three steps──▶ the same ──▶ largest relative difference
    four processes ──two steps──▶ checkpoint ──loaded by other layouts──▶ the third step ──▶ the same

Everything is float32 and real: Megatron-Core over gloo (NCCL on GPUs), the learner of a run, batches of uneven length.
Layouts of equal size run one after another in the same processes.
"""

from __future__ import annotations

import json
import math
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from launch.convert.new_model import new_model
from launch.run.processes import child_environment, run_ranks, torchrun
from launch.terminal import counted
from pipeline.config.recipe import LearnerSection, OptimizerSection, parse_layout
from pipeline.data.files import write_atomically
from pipeline.data.run_directory import RunDirectory
from pipeline.errors import RecipeError

MAX_ROW = 40
"""Tokens of the longest row that predict another token: all but the last."""
DENSE = (
    "one×MB1",
    "one×MB2",
    "one×RECOMPUTE",
    "one×SELECTIVE",
    "TP2",
    "TP2×SP",
    "PP2",
    "PP2×MB2",
    "PP2×VPP2",
    "PP2×VPP2×MB2",
    "CP2",
    "DP2",
    "DP2×PLAIN",
    "TP2×PP2",
    "TP2×SP×PP2×VPP2×RECOMPUTE",
    "TP2×CP2",
    "TP2×SP×CP2",
    "TP2×SP×DP2",
    "PP2×CP2×MB2",
    "PP2×DP2",
    "CP2×DP2",
)
EXPERTS = (
    "one×MB2",
    "EP2",
    "PP2×VPP2",
    "TP2×SP",
    "TP2×SP×ETP2",
    "CP2×EP2",
    "TP2×SP×EP2",
    "PP2×EP2×MB2",
    "DP2×EP2×TP2×SP",
)
"""EPn spreads experts over n data parallel ranks when no other ranks are named."""
REPLAY = ("one×MB2", "one×SELECTIVE", "CP2", "PP2×EP2", "PP2×VPP2×RECOMPUTE×MB2", "TP2×SP×EP2", "CP2×EP2")
"""Layouts for experts chosen by an engine, here at random: tokens and their routes must be split alike."""
LAYOUTS = {"dense": DENSE, "experts": EXPERTS, "replay": REPLAY}
SAVERS = {"dense": "TP2×PP2", "experts": "PP2×EP2"}
LOADERS = {"dense": ("one", "TP2", "PP2", "PP2×VPP2", "DP2"), "experts": ("one", "EP2", "TP2×SP")}


@dataclass(frozen=True)
class Case:
    model: str
    layout: str
    checkpoint: Literal["", "saved", "loaded"] = ""
    """Use of the model's checkpoint before the third step."""

    @property
    def name(self) -> str:
        return " ".join([self.model, self.layout, self.checkpoint]).strip()


QUANTITIES = ("logprobs", "loss", "grad_norm", "ess", "weight_change")


def verify_layouts(models: Sequence[str], layouts: Sequence[str] | None, tolerance: float) -> dict[str, Any]:
    """Run the comparisons. Returns worst_relative_difference, tolerance, layouts (case → quantity → difference), ok."""
    if layouts is not None and set(layouts) <= {"one"}:
        raise RecipeError(
            "--layouts has nothing but one, which the others are compared with; name another one, such as TP2"
        )
    cases = [case for model in models for case in build_cases(model, layouts)]
    with tempfile.TemporaryDirectory(prefix="evenkeel-layouts-") as scratch:
        folder = Path(scratch)
        for model in models:
            write_model(folder / model, experts=model != "dense")
        run_cases(folder, cases)
        differences = {
            case.name: compare(read(folder, Case(case.model, "one").name), read(folder, case.name))
            for case in cases
            if case != Case(case.model, "one")
        }
    worst = max(worst_of(row) for row in differences.values())
    return dict(worst_relative_difference=worst, tolerance=tolerance, layouts=differences, ok=bool(worst <= tolerance))


def worst_of(row: dict[str, float]) -> float:
    """Return the largest difference. NaN counts as infinite, since `max` passes over it."""
    return max(math.inf if math.isnan(value) else value for value in row.values())


def build_cases(model: str, layouts: Sequence[str] | None) -> list[Case]:
    """Return the reference and the cases to compare with it; without `layouts`, also the model's checkpoint cases."""
    if model not in LAYOUTS:
        raise RecipeError(f"--models: {model!r} is not one of {', '.join(LAYOUTS)}")
    names = layouts or LAYOUTS[model]
    cases = [Case(model, name) for name in ("one", *(name for name in names if name != "one"))]
    if layouts is None and model in SAVERS:
        cases.append(Case(model, SAVERS[model], "saved"))
        cases += [Case(model, name, "loaded") for name in LOADERS[model]]
    return cases


def section(name: str) -> LearnerSection:
    sizes = parse_layout(name)
    rows = sizes.pop("micro_batch_rows", None)
    return LearnerSection(
        **sizes,
        precision="fp32",
        micro_batch_tokens=MAX_ROW * (rows or 64),
        # Adam divides by the gradient's own size: with a small eps, rounding of gradients near zero (1e-9 beside 1e-8)
        # would come out as whole steps. 1e-4 keeps the update a smooth function of the gradient.
        optimizer=OptimizerSection(lr=1e-3, warmup_steps=0, eps=1e-4),
    )


def write_model(folder: Path, *, experts: bool) -> None:
    """Write a model of four layers, so that two stages can be interleaved twice."""
    sizes: dict[str, Any] = dict(hidden=64, layers=4, heads=4, kv_heads=2, head_dim=16, ffn=96)
    if experts:
        sizes |= dict(experts=4, experts_per_token=2, expert_ffn=48)
    new_model(folder, **sizes)


def run_cases(folder: Path, cases: Iterable[Case]) -> None:
    """Run the cases, a torchrun for each number of processes; the largest comes first and saves the checkpoints."""
    by_size: dict[int, list[Case]] = defaultdict(list)
    for case in cases:
        by_size[section(case.layout).num_processes].append(case)
    run = RunDirectory(folder)
    run.logs.mkdir()
    with counted("layouts", sum(len(same) for same in by_size.values())) as show:
        for size, same in sorted(by_size.items(), reverse=True):
            orders = [
                dict(vars(case), name=case.name, learner=section(case.layout).model_dump(mode="json")) for case in same
            ]
            write_atomically(folder / "cases.json", json.dumps(orders))
            run_ranks(
                run,
                torchrun(size, "launch.verify.layout_ranks", str(folder)),
                log=run.logs / "layouts.log",
                env=child_environment(),
                watch=lambda: show(len(list(folder.glob("*.npz")))),
                deadline_s=120.0 * len(same),
            )


def read(folder: Path, name: str) -> dict[str, NDArray[np.float64]]:
    with np.load(folder / f"{name}.npz", allow_pickle=False) as stored:
        return {key: stored[key] for key in stored.files}


def compare(reference: dict[str, NDArray[np.float64]], found: dict[str, NDArray[np.float64]]) -> dict[str, float]:
    """Return quantity → largest |found − reference| / |reference| over the trained steps; for weight_change, by L2
    norms. Equal numbers, zeros too, do not differ."""
    differences = {}
    for name in QUANTITIES:
        theirs, ours = reference[name], found[name]
        if name == "weight_change":
            differences[name] = float(np.linalg.norm(ours - theirs) / np.linalg.norm(theirs))
        else:
            last = theirs[-len(ours) :]
            with np.errstate(divide="ignore", invalid="ignore"):
                differences[name] = float(np.max(np.where(ours == last, 0.0, np.abs(ours - last) / np.abs(last))))
    return differences


def render(result: dict[str, Any]) -> None:
    table = Table(title="Relative difference to one process, three steps in float32")
    table.add_column("layout")
    for quantity in QUANTITIES:
        table.add_column(quantity.replace("_", " "), justify="right")
    for name, row in result["layouts"].items():
        cells = [f"{row[quantity]:.1e}" for quantity in QUANTITIES]
        table.add_row(name, *cells, style=None if worst_of(row) <= result["tolerance"] else "red")
    console = Console()
    console.print(table)
    console.print(f"worst {result['worst_relative_difference']:.2e}, allowed {result['tolerance']:.0e}")

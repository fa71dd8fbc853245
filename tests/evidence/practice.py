"""The first lines of docs/evidence.md: what a practitioner should do, each with the numbers that say so.

A rule reads what was measured and words its advice by it: where the numbers turn, so does the sentence; where they are
missing, there is none.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from tests.evidence.forecast import forecast_errors
from tests.evidence.hypotheses import FORECAST_MARGIN
from tests.evidence.matrix import read_matrix
from tests.evidence.results import Arm, Result, load
from tests.evidence.robust_table import BAR, MATRIX, RobustTable, load_results, results_file, stand_in
from tests.evidence.statistics import Spread

MATTERS = 0.1
"""A smaller difference of pass@1 than this is called none."""
MENTIONED = 4
"""So many others are named."""
SCREEN = "One seed: a screen."


def practice(folder: Path) -> list[str]:
    """A list in Markdown, from the results in the folder beside the page."""
    rules = (_unknown_disagreement, _old_samples, _another_distribution, _one_stage, _credit, _formats, _forecast)
    return [f"- {line}" for line in (rule(folder) for rule in rules) if line]


def _unknown_disagreement(folder: Path) -> str:
    matrix = read_matrix(MATRIX)
    table = RobustTable.of(matrix, load_results(matrix, folder))
    if len(table.whole) < 2:
        return ""
    first, share = next(iter(table.whole.items()))
    worst = table.cells[table.worst_cell(first)]
    rest = [f"{table.titles[arm]} at {_two(one)}" for arm, one in table.whole.items() if arm != first]
    lower = len(rest) - MENTIONED
    seeds = table.least_seeds(first)
    fewest = min(map(table.least_seeds, table.scores))
    own = len(table.own_cells(first))
    borrowed = ""
    if own < len(table.cells):
        borrowed = f" {own} of them tell it from its kin: in the others it is {table.titles[stand_in(first)]}."
    ties = sum(round(one, 2) == round(share, 2) for one in table.whole.values()) - 1
    mean = f" In the mean it has {_two(table.mean_share(first))} of the best." if ties else ""
    trust = SCREEN if seeds < 2 else f"It has {seeds} or more seeds a cell, other arms from {fewest} on."
    return (
        f"**Where you do not know how sampler and learner will disagree: {table.titles[first]}.** Over "
        f"{len(table.cells)} conditions of age, rollout format and temperature it ends at {_two(share)} of the best "
        f"arm where it does worst ({worst}){'' if share >= BAR else f', short of the bar of {_two(BAR)}'}; others in "
        f"theirs: {', '.join(rest[:MENTIONED])}{f' and {lower} lower' if lower > 0 else ''}.{borrowed} "
        f"{trust}{mean} [robust.md](robust.md) has every cell."
    )


def _old_samples(folder: Path) -> str:
    results = load(results_file(folder, "lag8"))
    ends = _ends(results, "fp32")
    if not {"cispo", "cispo_age", "cispo_const"} <= ends.keys():
        return ""
    full, age, const = (ends[arm] for arm in ("cispo", "cispo_age", "cispo_const"))
    advice = (
        "take smaller steps before you change the objective" if min(age, const) > full + MATTERS else "no smaller steps"
    )
    others = {arm: end for arm, end in ends.items() if not arm.endswith(("_age", "_const", "_ess"))}
    best = max(others, key=lambda arm: others[arm])
    kept = ""
    if best in ("decoupled", "split") and others[best] > full + MATTERS:
        kept = f" Of the objectives at the full rate, {best} ends highest ({_two(others[best])})."
    return (
        f"**Samples several versions old: {advice}.** At lag 8, CISPO with cap 5 ends at {_two(full)} at the full "
        f"learning rate, at {_two(age)} with `learner.optimizer.lr_by_lag: sqrt` and at {_two(const)} with a third of "
        f"the rate: {'how age is counted matters less than the size' if abs(age - const) < MATTERS else 'age counts'}."
        f"{kept} {_seeds(results)} [robust.md](robust.md) has every arm."
    )


def _another_distribution(folder: Path) -> str:
    results = load(folder / "mismatch.json")
    hot, fp8 = _ends(results, "t12"), _ends(results, "fp8")
    if any("grpo_02" not in ends or len(ends) < 2 for ends in (hot, fp8)):
        return ""
    top = [max(ends, key=lambda arm: ends[arm]) for ends in (hot, fp8)]
    rest = [end for ends in (hot, fp8) for arm, end in ends.items() if arm != "grpo_02"]
    narrow = all(ends["grpo_02"] < ends[best] - MATTERS for ends, best in zip((hot, fp8), top, strict=True))
    return (
        "**Engines that sample otherwise than the learner: "
        + ("no clip of 0.2.**" if narrow else "a clip of 0.2 will do.**")
        + f" It ends at {_two(hot['grpo_02'])} where engines sample at T = 1.2 and at {_two(fp8['grpo_02'])} with FP8 "
        f"rollouts, the best arm at {_two(hot[top[0]])} and {_two(fp8[top[1]])}. Clip 0.6, CISPO and P3O end between "
        f"{_two(min(rest))} and {_two(max(rest))}; which of them is best is not decided. {_seeds(results)}"
    )


def _one_stage(folder: Path) -> str:
    results = load(folder / "staged.json")
    ends = _ends(results, "fp32")
    if "sync" not in ends or len(ends) < 2:
        return ""
    staged = [end for arm, end in ends.items() if arm != "sync"]
    first = ends["sync"] > max(staged)
    return (
        f"**Many updates on one stage's rollouts: {'no' if first else 'a'} gain at the end was seen.** Sync ends at "
        f"{_two(ends['sync'])}, stages of 32 updates between {_two(min(staged))} and {_two(max(staged))}. "
        f"{_seeds(results)}"
    )


def _credit(folder: Path) -> str:
    """Whose gradient counts."""
    results = load(folder / "credit_hard.json")
    once, eight = _ends(results, "fp32"), _ends(results, "fp32", k=8)
    if not {"grpo", "power", "fade", "fade_target"} <= once.keys():
        return ""
    others = [arm for arm in once if arm != "grpo"]
    gain = any(ends[arm] > ends["grpo"] + MATTERS for ends in (once, eight) for arm in others)
    grpo, power, fade, target = (
        f"{_two(once[arm])} ({_two(eight[arm])})" for arm in ("grpo", "power", "fade", "fade_target")
    )
    return (
        f"**Prompts or failures that weigh otherwise than in GRPO: {'a' if gain else 'no'} gain at the end was seen.** "
        f"Where pass@8 keeps room, GRPO ends at a pass@1 (and pass@8) of {grpo}, Power at {power}, FADE at {fade}, and "
        f"FADE with an entropy target that is not reached, so that failures weigh more from the start, at {target}. "
        f"{_seeds(results)}"
    )


def _formats(folder: Path) -> str:
    path = folder / "formats.json"
    cells = json.loads(path.read_text()) if path.exists() else []
    by_format: dict[str, list[float]] = {}
    for cell in cells:
        if not cell["follows"]:
            by_format.setdefault(cell["precision"], []).append(cell["ess"])
    if not {"fp8_block", "emulated_mxfp4"} <= by_format.keys():
        return ""
    fp8, mxfp4 = (float(np.mean(by_format[name])) for name in ("fp8_block", "emulated_mxfp4"))
    return (
        "**FP8 rollouts cost little by themselves, FP4 much.** Before any training block FP8 leaves an ESS of "
        f"{fp8:.3f}, MXFP4 one of {mxfp4:.2f}; a learner that computes in the same format (`learner.fp8_emulation`) "
        "takes that away ([unified-precision.md](unified-precision.md))."
    )


def _forecast(folder: Path) -> str:
    results = load(folder / "scaling.json")
    arms = _arms(results, "fp32").values()
    third, half = ([float(forecast_errors(arm, share).mean()) for arm in arms] for share in (0.3334, 0.5))
    if not arms or not np.isfinite(third + half).all():
        return ""
    advice = "a third of it is enough" if max(map(abs, third)) <= FORECAST_MARGIN else "not by its first third"
    by_third, by_half = (
        " and ".join(f"{error:+.2f}".replace("0.", ".") for error in errors) for errors in (third, half)
    )
    return (
        f"**Stopping a run by a forecast of its end: {advice}.** ScaleRL's sigmoid, fitted to the first third, misses "
        f"the end by {by_third}, fitted to the first half by {by_half} (one number a recipe, the mean of its "
        f"seeds; less than {_two(FORECAST_MARGIN)} would do). {_seeds(results)}"
    )


def _ends(results: Sequence[Result], condition: str, k: int = 1) -> Mapping[str, float]:
    """Arm → mean pass@k of the last version."""
    return {name: float(arm.run_curve(k).end.mean()) for name, arm in _arms(results, condition).items()}


def _arms(results: Sequence[Result], condition: str) -> Mapping[str, Arm]:
    """Those with an evaluation, by name."""
    arms = {one.arm: Arm.of(results, condition, one.arm) for one in results if one.condition == condition}
    return {name: arm for name, arm in arms.items() if arm.results}


def _seeds(results: Sequence[Result]) -> str:
    """How far to trust it."""
    arms = [Arm.of(results, *cell) for cell in {(one.condition, one.arm) for one in results}]
    ends = [arm.run_curve().end for arm in arms if arm.results]
    least, most = min(map(len, ends)), max(map(len, ends))
    if most < 2:
        return SCREEN
    seeds = f"{most}" if least == most else f"{least} to {most}"
    return f"{seeds} seeds; runs of one recipe differ by {float(Spread.of(ends).sd):.2f}."


def _two(end: float) -> str:
    return f"{end:.2f}".removeprefix("0")

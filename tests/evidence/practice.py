"""The first lines of docs/evidence.md: what a practitioner should do, each with the numbers that say so.

A rule reads what was measured and words its advice by it: where the numbers turn, so does the sentence; where they are
missing, there is none.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from tests.evidence.forecast import forecast_errors
from tests.evidence.hypotheses import FORECAST_MARGIN
from tests.evidence.matrix import Matrix, read_matrix
from tests.evidence.results import Arm, Result, load
from tests.evidence.robust_repeat import Repeats
from tests.evidence.robust_table import BAR, MATRIX, RobustTable, base_of, load_results, results_file, two
from tests.evidence.statistics import ALPHA, Spread

MATTERS = 0.1
"""A smaller difference of pass@1 than this is called none."""
MENTIONED = 4
"""So many others are named."""
SCREEN = "One seed: a screen."
FOUR_BITS = ("emulated_fp4", "emulated_nvfp4", "emulated_mxfp4")
SHARES = {"the first quarter": 0.25, "the first third": 0.3334, "the first half": 0.5}
"""What forecasts are fitted to."""


def practice(folder: Path) -> list[str]:
    """A list in Markdown, from the results in the folder beside the page."""
    rules = (_unknown_disagreement, _old_samples, _another_distribution, _one_stage, _credit, _formats, _forecast)
    return [f"- {line}" for line in (rule(folder) for rule in rules) if line]


def _unknown_disagreement(folder: Path) -> str:
    matrix = read_matrix(MATRIX)
    table = RobustTable.of(matrix, load_results(matrix, folder))
    if len(table.whole) < 2:
        return ""
    passing = [arm for arm, share in table.whole.items() if share >= BAR]
    best = passing or list(table.whole)[:1]
    bases = " or ".join(dict.fromkeys(table.titles.get(base_of(arm), base_of(arm)) for arm in best))
    smaller = ", with smaller steps where samples are old" * all(base_of(arm) != arm for arm in best)
    shares = "; ".join(f"{table.titles[arm]} {two(table.whole[arm])}" for arm in best[:MENTIONED])
    rest = f" and {len(best) - MENTIONED} lower" * (len(best) > MENTIONED)
    reach = f"{len(passing)} of {len(table.whole)} arms end" if passing else "no arm ends"
    seeds = min(map(table.least_seeds, best))
    keys = ", ".join(f"`{text}`" for text in _settings(matrix, best[0]))
    return (
        f"**Where you do not know how sampler and learner will disagree: {bases}{smaller}.** Over {len(table.cells)} "
        f"conditions of age, rollout format and temperature {reach} at {two(BAR)} or more of the best arm in each; "
        f"{'worst shares' if passing else 'the nearest'}: {shares}{rest}.{_again(table, passing)} Keys of the first: "
        f"{keys}. {SCREEN if seeds < 2 else f'{seeds} or more seeds a cell.'} [robust.md](robust.md) has every arm."
    )


def _again(table: RobustTable, passing: Sequence[str]) -> str:
    """How sure the names are."""
    repeats = Repeats.of(table)
    if repeats is None or not passing:
        return ""
    chances = [repeats.passes[arm] for arm in passing]
    first = "not decided" if repeats.first[passing[0]] < 1.0 - ALPHA else table.titles[passing[0]]
    return (
        f" Were all runs repeated, each of them would be there again with a chance of {min(chances):.0%} to "
        f"{max(chances):.0%}; which is first is {first}."
    )


def _settings(matrix: Matrix, arm: str) -> list[str]:
    """What a recipe has to say for an arm: `KEY: VALUE`, as YAML on one line."""
    variant = next(one.arms[arm] for one in matrix.experiments.values() if arm in one.arms)
    return [f"{key}: {_yaml(value)}" for key, value in variant.set.items()]


def _yaml(value: Any) -> str:
    return yaml.safe_dump(value, default_flow_style=True, sort_keys=False).removesuffix("...\n").strip()


def _old_samples(folder: Path) -> str:
    """Objectives at the full rate, by age and at the smaller constant: what the size of a step does to each."""
    matrix = read_matrix(MATRIX)
    results = load(results_file(folder, "lag8"))
    titles = {arm: one.title for arm, one in matrix.experiments["lag8"].arms.items()}
    ends = _ends(results, "fp32")
    bases = [arm for arm in ends if {f"{arm}_age", f"{arm}_const"} <= ends.keys()]
    if "cispo" not in bases:
        return ""
    full, age, const = (ends[arm] for arm in ("cispo", "cispo_age", "cispo_const"))
    small = {base: max(ends[f"{base}_age"], ends[f"{base}_const"]) for base in bases}
    lower = [titles[base] for base in bases if small[base] < ends[base] - MATTERS]
    best = max(bases, key=lambda base: ends[base])
    advice = "take smaller steps" if min(age, const) > full + MATTERS else "no smaller steps"
    others = ""
    if len(bases) > 1:
        others = (
            f" {len(bases)} objectives end between {two(min(ends[one] for one in bases))} and {two(ends[best])} at "
            f"the full rate (highest: {titles[best]}), and between {two(min(small.values()))} and "
            f"{two(max(small.values()))} with the better of the two smaller steps; lower with them: "
            f"{', '.join(lower) or 'none'}."
        )
    return (
        f"**Samples several versions old: {advice}.** At a lag of 8, CISPO with cap 5 ends at {two(full)} at the full "
        f"learning rate, at {two(age)} with `learner.optimizer.lr_by_lag: sqrt` and at {two(const)} with a third of "
        f"the rate: {'how age is counted matters less than the size' if abs(age - const) < MATTERS else 'age counts'}."
        f"{others} {_seeds(results, 'fp32')} [robust.md](robust.md) has every arm."
    )


def _another_distribution(folder: Path) -> str:
    results = load(results_file(folder, "fresh"))
    hot, fp8 = _ends(results, "t12"), _ends(results, "fp8")
    if any("grpo_02" not in ends or len(ends) < 2 for ends in (hot, fp8)):
        return ""
    top = [max(ends, key=lambda arm: ends[arm]) for ends in (hot, fp8)]
    rest = [end for ends in (hot, fp8) for arm, end in ends.items() if arm != "grpo_02"]
    narrow = all(ends["grpo_02"] < ends[best] - MATTERS for ends, best in zip((hot, fp8), top, strict=True))
    return (
        "**Fresh samples of engines that sample otherwise than the learner: "
        + ("no clip of 0.2 around the engine's probabilities.**" if narrow else "a clip of 0.2 will do.**")
        + f" It ends at {two(hot['grpo_02'])} where engines sample at T = 1.2 and at {two(fp8['grpo_02'])} with "
        f"block FP8 rollouts, the best arm at {two(hot[top[0]])} and {two(fp8[top[1]])}. The other arms end between "
        f"{two(min(rest))} and {two(max(rest))}; which of them is best is not decided. "
        f"{_seeds(results, 't12', 'fp8')} An earlier matrix with the same arms is below."
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
        f"{two(ends['sync'])}, stages of 32 updates between {two(min(staged))} and {two(max(staged))}. "
        f"{_seeds(results, 'fp32')}"
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
        f"{two(once[arm])} ({two(eight[arm])})" for arm in ("grpo", "power", "fade", "fade_target")
    )
    return (
        f"**Prompts or failures that weigh otherwise than in GRPO: {'a' if gain else 'no'} gain at the end was seen.** "
        f"Where pass@8 keeps room, GRPO ends at a pass@1 (and pass@8) of {grpo}, Power at {power}, FADE at {fade}, and "
        f"FADE with an entropy target that is not reached, so that failures weigh more from the start, at {target}. "
        f"{_seeds(results, 'fp32')}"
    )


def _formats(folder: Path) -> str:
    path = folder / "formats.json"
    cells = json.loads(path.read_text()) if path.exists() else []
    by_format: dict[str, list[float]] = {}
    for cell in cells:
        if not cell["follows"]:
            by_format.setdefault(cell["precision"], []).append(cell["ess"])
    means = {name: float(np.mean(found)) for name, found in by_format.items()}
    fours = [mean for name, mean in means.items() if name in FOUR_BITS]
    if "fp8_block" not in means or not fours:
        return ""
    return (
        "**FP8 rollouts cost little ESS by themselves, FP4 much.** Before any training block FP8 leaves an ESS of "
        f"{means['fp8_block']:.3f}, formats of 4 bits {two(min(fours))} to {two(max(fours))}; what becomes of it in "
        "training depends on the objective (above). In FP32 a learner that computes in the same format "
        "(`learner.fp8_emulation`) takes that away, over BF16 far less ([unified-precision.md](unified-precision.md))."
    )


def _forecast(folder: Path) -> str:
    results = load(folder / "scaling.json")
    arms = _arms(results, "fp32").values()
    errors = {name: [float(forecast_errors(arm, share).mean()) for arm in arms] for name, share in SHARES.items()}
    if not arms or not np.isfinite(list(errors.values())).all():
        return ""
    enough = [name for name, row in errors.items() if max(map(abs, row)) <= FORECAST_MARGIN]
    advice = f"{enough[0]} is enough" if len(enough) == len(errors) else "undecided; not by one forecast alone"
    told = ", ".join(
        f"to {name} " + " and ".join(f"{error:+.2f}".replace("0.", ".") for error in row)
        for name, row in errors.items()
    )
    return (
        f"**Stopping a run by a forecast of its end: {advice}.** ScaleRL's sigmoid misses the end, fitted {told} (one "
        f"number a recipe, the mean of its seeds; less than {two(FORECAST_MARGIN)} would do). "
        f"{_seeds(results, 'fp32')}"
    )


def _ends(results: Sequence[Result], condition: str, k: int = 1) -> Mapping[str, float]:
    """Arm → mean pass@k of the last version."""
    return {name: float(arm.run_curve(k).end.mean()) for name, arm in _arms(results, condition).items()}


def _arms(results: Sequence[Result], condition: str) -> Mapping[str, Arm]:
    """Those with an evaluation, by name."""
    arms = {one.arm: Arm.of(results, condition, one.arm) for one in results if one.condition == condition}
    return {name: arm for name, arm in arms.items() if arm.results}


def _seeds(results: Sequence[Result], *conditions: str) -> str:
    """How far to trust it: seeds of the conditions that were quoted, scatter of the whole experiment."""
    cells = {(one.condition, one.arm) for one in results}
    ends = {cell: arm.run_curve().end for cell in cells if (arm := Arm.of(results, *cell)).results}
    counts = [len(end) for (condition, _), end in ends.items() if condition in conditions]
    least, most = min(counts), max(counts)
    if most < 2:
        return SCREEN
    seeds = f"{most}" if least == most else f"{least} to {most}"
    return f"{seeds} seeds; run-to-run standard deviation {two(float(Spread.of(ends.values()).sd))}."

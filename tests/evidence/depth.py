"""`python -m tests.evidence.depth`: how much of the gap to an FP8 engine the learner's emulation explains, by depth.

    engine     decodes rows of tokens, and prefills them again; in FP32 and in each FP8 format     SGLang on a CPU
    learner    scores the same rows plainly, emulated, and emulated with noise                     Megatron-Core

Two implementations of the same formats differ in the last bits of float32. Now and then an activation lies so close to
the middle between two e4m3 values that such a bit decides where it is rounded, and later layers carry that on. How far
this rounding luck moves the log-probabilities is measured twice without comparing learner and engine:

    engine's luck    mean |decode − prefill| of one FP8 engine: the same weights and formats, summed in another order
    learner's luck   mean |emulated with noise − emulated|, the noise on the inputs of the linears as large as what
                     engine and learner differ by anyway: it moves the unquantized learner as far as the FP32 engine
                     lies from it
    gap              mean |learner − engine|, learner unquantized
    emulated         mean |learner emulated − engine|
    closed           1 − emulated / gap
    explained        (gap − emulated) / (gap − engine's luck): of what is no luck, the share that emulation explains

All are on the sampled tokens, against what the engine said as it decoded them, which is what training sees, and against
its prefill of the same tokens, which sums in nearly the same order as the learner: there nothing is taken off.

Killed and started again it goes on where it was: each model is measured once, into a file of its own.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import random
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from launch.build.components import build_contract, build_prompts, build_quant_map, build_tokenizer
from launch.convert.new_model import new_model
from launch.run.sft import demonstrations_of, supervised_batch
from launch.verify.parity import FP8_FORMATS, Engine, parity_recipe, prepare
from pipeline.config.recipe import LearnerSection, OptimizerSection, Recipe
from pipeline.data.files import write_atomically
from pipeline.ports.engines import Sampling
from pipeline.tasks import build_task
from tests.evidence.matrix import REPOSITORY
from tests.support.engine_forks import forked_engines

LAYERS = (2, 4, 8, 16)
PROMPTS, SAMPLES, PROMPT_TOKENS, NEW_TOKENS = 32, 2, 24, 24
DRAWS = 2
"""Independent draws of the noise."""
SFT_STEPS, SFT_BATCH = 100, 16
NARROW = dict(hidden=64, heads=4, kv_heads=2, head_dim=64, ffn=256)
"""Trained models are narrower, so that 16 layers learn in minutes."""

VIEWS = ("decode", "prefill")

Scores = list[NDArray[np.float64]]


@dataclass(frozen=True, kw_only=True)
class Case:
    """One model: `random` weights, or `trained` on demonstrations of sorting digits."""

    kind: str
    layers: int
    seed: int

    @property
    def name(self) -> str:
        return f"{self.kind}-{self.layers}-{self.seed}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure what is missing, then print the table."""
    options = _parse(arguments)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    results = []
    with forked_engines():
        for seed, kind, layers in itertools.product(options.seeds, options.kinds, options.layers):
            case = Case(kind=kind, layers=layers, seed=seed)
            path = options.root / f"{case.name}.json"
            if not path.exists():
                started = time.time()
                write_atomically(path, json.dumps(measure(case, options.root), indent=1))
                print(f"{case.name}: {time.time() - started:.0f} s", file=sys.stderr, flush=True)
            results.append(json.loads(path.read_text()))
    print(table(results))
    if options.out:
        write_atomically(options.out, json.dumps(results, indent=1) + "\n")
    return 0


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    def numbers(text: str) -> list[int]:
        return [int(part) for part in text.split(",")]

    parser = argparse.ArgumentParser(prog="python -m tests.evidence.depth", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--layers", type=numbers, default=list(LAYERS))
    parser.add_argument("--seeds", type=numbers, default=[0, 1, 2])
    parser.add_argument("--kinds", type=lambda text: text.split(","), default=["random", "trained"])
    parser.add_argument("--root", type=Path, default=REPOSITORY / "runs" / "depth", help="where what was measured lies")
    parser.add_argument("--out", type=Path, help="write all results into this JSON file")
    return parser.parse_args(arguments)


def measure(case: Case, root: Path) -> dict[str, Any]:
    """Everything about one model."""
    model = root / "models" / case.name
    loss = None if model.exists() else make(case, model)
    engines = {name: engine_scores(root, case, model, name) for name in ("fp32", *FP8_FORMATS)}
    found: dict[str, Any] = dict(kind=case.kind, layers=case.layers, seed=case.seed, sft_loss=loss)
    with scorer(parity_recipe(root, case.name, model, "fp32", {})) as learner:
        fp32 = engines["fp32"]
        plain = fp32.mine(learner.score_tokens(fp32.rows))
        gaps = {view: float(np.abs(plain - fp32.said(view)).mean()) for view in VIEWS}
        moved = [np.abs(one - plain).mean() for one in scattered(learner, fp32, 1.0)]
        noise = gaps["decode"] / float(np.mean(moved))
        found |= dict(fp32_gap=gaps, noise_ulps=noise)
        for name in FP8_FORMATS:
            quant = build_quant_map(parity_recipe(root, case.name, model, name, {}))
            found |= {f"{name}_{view}": row for view, row in compare(learner, quant, engines[name], noise).items()}
    return found


@dataclass(frozen=True)
class Said:
    """What an engine said about the tokens of rows that it sampled."""

    rows: list[list[int]]
    prefill: Scores
    """[rows] of tokens 1 … n-1."""
    decode: Scores
    """[rows] of the sampled tokens, which are the last ones."""

    def said(self, view: str) -> NDArray[np.float64]:
        """Of the sampled tokens of all rows, one after another."""
        return np.concatenate(self.decode) if view == "decode" else self.mine(self.prefill)

    def mine(self, scores: Sequence[NDArray[Any]]) -> NDArray[np.float64]:
        """Of `scores` of tokens 1 … n-1, those of the sampled tokens."""
        ends = [np.asarray(row, np.float64)[-len(said) :] for row, said in zip(scores, self.decode, strict=True)]
        return np.concatenate(ends)

    @property
    def row(self) -> NDArray[np.int64]:
        """[sampled tokens] the row of each."""
        return np.repeat(np.arange(len(self.rows)), [len(said) for said in self.decode])


def scattered(learner: Any, engine: Said, ulps: float) -> list[NDArray[np.float64]]:
    """The learner's scores with DRAWS draws of noise."""
    return [engine.mine(noisy(learner, engine.rows, ulps, draw)) for draw in range(DRAWS)]


def compare(learner: Any, quant: Any, engine: Said, noise: float) -> dict[str, dict[str, Any]]:
    """By view: gaps between learner and engine on the sampled tokens, and how far luck moves them."""
    from megatron_bridge.step.fp8_emulation import emulated

    plain = engine.mine(learner.score_tokens(engine.rows))
    with emulated(learner, quant):
        ours = engine.mine(learner.score_tokens(engine.rows))
        moved = [np.abs(one - ours).mean() for one in scattered(learner, engine, noise)]
    own, found = np.abs(engine.said("decode") - engine.said("prefill")), {}
    for view in VIEWS:
        said = engine.said(view)
        gap, left, luck = np.abs(plain - said), np.abs(ours - said), own if view == "decode" else np.zeros_like(own)
        low, high = bootstrap(engine.row, lambda rows, of=(gap, left, luck): share(*(values[rows] for values in of)))
        found[view] = dict(
            tokens=len(said),
            gap=float(gap.mean()),
            emulated=float(left.mean()),
            engine_luck=float(own.mean()),
            learner_luck=float(np.mean(moved)),
            closed=float(1 - left.mean() / gap.mean()),
            explained=share(gap, left, luck),
            explained_low=low,
            explained_high=high,
            signed=float((ours - said).mean()),
            signed_error=float((ours - said).std() / np.sqrt(len(said))),
        )
    return found


def share(gap: NDArray[np.float64], left: NDArray[np.float64], luck: NDArray[np.float64]) -> float:
    """Of the gap that is not luck, what the emulation explains."""
    return float((gap.mean() - left.mean()) / (gap.mean() - luck.mean()))


def bootstrap(owner: NDArray[np.int64], statistic: Callable[[NDArray[np.int64]], float]) -> tuple[float, float]:
    """95 % interval over rows, drawn with replacement: tokens of a row are not independent."""
    generator = np.random.default_rng(0)
    of_row = [np.flatnonzero(owner == row) for row in range(owner.max() + 1)]
    drawn = [
        statistic(np.concatenate([of_row[row] for row in generator.integers(0, len(of_row), len(of_row))]))
        for _ in range(500)
    ]
    low, high = np.quantile(drawn, [0.025, 0.975])
    return float(low), float(high)


def engine_scores(root: Path, case: Case, model: Path, precision: str) -> Said:
    """Start an engine and let it sample, or read what one said before."""
    kept = root / "engines" / f"{case.name}-{precision}.json"
    if not kept.exists():
        recipe = parity_recipe(root / "runs", f"{case.name}-{precision}-{os.getpid()}", model, precision, {})
        with Engine(prepare(recipe), recipe) as engine:
            rows = asyncio.run(sample(engine, prompts_of(recipe, case)))
            prefill = asyncio.run(engine.prefill(rows.tokens))
        kept.parent.mkdir(parents=True, exist_ok=True)
        found = dict(rows=rows.tokens, prefill=_lists(prefill), decode=_lists(rows.sampled))
        write_atomically(kept, json.dumps(found))
    said = json.loads(kept.read_text())
    return Said(said["rows"], *([np.asarray(row) for row in said[view]] for view in ("prefill", "decode")))


def _lists(scores: Scores) -> list[list[float]]:
    return [row.tolist() for row in scores]


async def sample(engine: Engine, prompts: list[list[int]]) -> Any:
    client = engine.client()
    try:
        sampling = Sampling(max_new_tokens=NEW_TOKENS)
        answers = await asyncio.gather(*(client.generate(prompt, SAMPLES, sampling) for prompt in prompts))
    finally:
        await client.close()
    return await engine.rows(prompts, answers)


def prompts_of(recipe: Recipe, case: Case) -> list[list[int]]:
    if case.kind == "trained":
        tasks = build_prompts(recipe, build_tokenizer(recipe))
        return [list(tasks.prompt(index).tokens) for index in range(PROMPTS)]
    vocabulary = json.loads((recipe.model.path / "config.json").read_text())["vocab_size"]
    generator = random.Random(case.seed)
    return [[generator.randrange(vocabulary) for _ in range(PROMPT_TOKENS)] for _ in range(PROMPTS)]


@contextmanager
def scorer(recipe: Recipe, objective: Any = None, **section: Any) -> Iterator[Any]:
    """A learner of one process, in float32, in this process."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Megatron-Core warns about packages that a CPU does not have
        from megatron_bridge.learner import MegatronLearner
        from megatron_bridge.parallel.layout import leave_layout
        from precision.supervised import Supervised

        try:
            yield MegatronLearner.create(
                recipe.model.path,
                LearnerSection(**dict(precision="fp32") | section),
                Supervised(),
                temperature=1.0,
                seed=0,
                total_steps=SFT_STEPS,
            )
        finally:
            leave_layout()


def noisy(learner: Any, rows: list[list[int]], ulps: float, draw: int) -> Any:
    """Score rows with each number that enters a linear layer multiplied by 1 + ulps × 2⁻²⁴ × a normal deviate."""
    import torch
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear

    generator = torch.Generator().manual_seed(draw)

    def disturb(_: Any, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        # In float64, for a factor so close to 1 has few bits in float32.
        noise = torch.randn(inputs[0].shape, generator=generator, dtype=torch.float64) * (ulps * 2.0**-24)
        return ((inputs[0].double() * (1 + noise)).to(inputs[0].dtype), *inputs[1:])

    linears = [
        module
        for chunk in learner.model
        for module in chunk.module.decoder.modules()
        if isinstance(module, ColumnParallelLinear | RowParallelLinear)
    ]
    hooks = [linear.register_forward_pre_hook(disturb) for linear in linears]  # before those of the emulation
    try:
        return learner.score_tokens(rows)
    finally:
        for hook in hooks:
            hook.remove()


def make(case: Case, folder: Path) -> float | None:
    """Write the model; the last loss where it was trained."""
    if case.kind == "random":
        new_model(folder, layers=case.layers, seed=case.seed)
        return None
    start = folder.with_name(f"{case.name}-start")
    if not start.exists():
        new_model(start, layers=case.layers, seed=case.seed, **NARROW)
    recipe = parity_recipe(folder.parent, case.name, start, "fp32", {})
    tokenizer, task = build_tokenizer(recipe), build_task(recipe.task, case.seed)
    contract = build_contract(recipe, tokenizer)
    optimizer = OptimizerSection(lr=2e-3, warmup_steps=10, decay="linear")
    with scorer(recipe, optimizer=optimizer) as learner:
        for step in range(SFT_STEPS):
            pairs = demonstrations_of(task, step * SFT_BATCH, SFT_BATCH)
            batch = supervised_batch(step, pairs, tokenizer, contract)
            loss = learner.update(batch, np.ones(batch.num_samples, np.float32), None).metrics["loss"]
        learner.export(folder)
    return float(loss)


def table(results: Sequence[dict[str, Any]]) -> str:
    """One line for each kind, format, view and depth: means over seeds, and the range of the seeds."""
    head = ("model", "format", "against", "layers", "gap", "emulated", "closed")
    head += ("engine's luck", "learner's luck", "explained", "least of a seed (95 % interval)")
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for kind in sorted({r["kind"] for r in results}):
        for view, name in itertools.product(VIEWS, FP8_FORMATS):
            for layers in sorted({r["layers"] for r in results if r["kind"] == kind}):
                found = [r[f"{name}_{view}"] for r in results if (r["kind"], r["layers"]) == (kind, layers)]
                mean = {key: np.array([one[key] for one in found]) for key in found[0]}
                gap, left = mean["gap"].mean(), mean["emulated"].mean()
                luck = mean["engine_luck"].mean() if view == "decode" else 0.0
                worst = min(found, key=lambda one: one["explained"])
                cells = [kind, name, view, layers, f"{gap:.1e}", f"{left:.1e}", f"{1 - left / gap:.1%}"]
                cells += [f"{mean[key].mean() / gap:.1%}" for key in ("engine_luck", "learner_luck")]
                cells += [f"{(gap - left) / (gap - luck):.1%}"]
                cells += [f"{worst['explained']:.1%} ({worst['explained_low']:.1%} to {worst['explained_high']:.1%})"]
                lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())

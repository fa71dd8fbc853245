"""Suggest layers that engines should not quantize (rank groups by emulation, promote the worst), and print quant maps.

rows      a run's newest batch, or sampled from the model by transformers    one child process (launch.quant_map.ranks)
ranking   learner in ranks, Megatron's own layers, formats emulated          torchrun          (launch.quant_map.ranks)
"""

from __future__ import annotations

import json
import math
import random
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import chain, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from launch.build.components import build_prompts, build_tokenizer
from launch.convert.folders import run_job
from launch.run.processes import child_environment, run_ranks, torchrun
from launch.terminal import check_recipe_or_run
from megatron_bridge.hf.model_config import ModelConfig, read_hf_config
from pipeline.config.loader import load_recipe, recipe_from
from pipeline.config.recipe import Recipe
from pipeline.data.files import write_atomically
from pipeline.data.run_directory import RunDirectory
from pipeline.data.store import BatchStore
from pipeline.errors import RecipeError
from precision.formats.quant_map import QuantMap, QuantMapFile
from precision.mismatch.sensitivity import Score, promote_greedily, rank_groups
from precision.torch_on_use import Tensor, torch

if TYPE_CHECKING:
    from megatron_bridge.step.micro_batches import TokenRows

PROMPT_TOKENS = 16
"""Length of random prompts, for a model without a recipe."""


def suggest(
    source: Path,
    out: Path | None,
    *,
    ess_floor: float,
    precision: str | None,
    num_rows: int,
    row_tokens: int,
    overrides: Sequence[str],
) -> dict[str, Any]:
    """Return the result of `judged` with version, rows and out; write `out`. Raises RecipeError, ModelError."""
    if out is not None and out.exists():
        raise RecipeError(f"--out {out} exists already; remove it or name another file")
    if out is not None and not out.parent.is_dir():
        raise RecipeError(f"--out {out}: {out.parent} is no folder; make it or name another file")
    run = RunDirectory(source) if (source / "recipe.yaml").exists() else None
    recipe = recipe_of(source, run, precision, overrides)
    recorded = None if run is None else recorded_rows(run, num_rows, row_tokens)
    if recorded is None:
        size = sum(path.stat().st_size for path in recipe.model.path.glob("*.safetensors"))
        place = dict(source=str(recipe.model.path.resolve()), temperature=recipe.rollout.temperature)
        job = dict(prompts=prompts_of(source, recipe, num_rows), row_tokens=row_tokens, **place)
        rows = run_job("launch.quant_map.ranks", job, None, size * num_rows)["rows"]
    else:
        rows = [asdict(row) for row in recorded.rows]
    source_run = None if run is None else str(run.path.resolve())
    recorded_in = {} if recorded is None else dict(batch=recorded.batch, samples=recorded.samples)
    result = in_ranks(recipe, dict(rows=rows, ess_floor=ess_floor, run=source_run, **recorded_in))
    scored = sum(sum(row["sampled"]) for row in rows)
    result["rows"] = dict(count=len(rows), tokens=scored, sampled_by="engine" if recorded else "model")
    result["out"] = None if out is None else str(out)
    if out is not None:
        write_atomically(out, commented(result, source))
    return result


def recipe_of(source: Path, run: RunDirectory | None, precision: str | None, overrides: Sequence[str]) -> Recipe:
    """Load or build a recipe whose rollouts have the format to start from, without a map. Raises RecipeError."""
    is_model = (source / "config.json").exists()
    if overrides and (is_model or run is not None):
        raise RecipeError(f"--set changes a recipe, but {source} is a {'model' if is_model else 'run'}; leave it out")
    if run is not None:
        recipe = run.recipe()
    elif is_model:
        scratch = dict(name="quant-map", root=tempfile.gettempdir(), steps=1)
        model, learner = dict(path=str(source.resolve())), dict(precision="fp32")
        data = dict(model=model, run=scratch, task=dict(name="sort_digits"), learner=learner)
        recipe = recipe_from(data, source="quant-map suggest")
    else:
        check_recipe_or_run(source)
        recipe = load_recipe(source, overrides)
    own = recipe.rollout.quantized_format
    chosen = precision or ("fp8_block" if own is None else own.value)
    rollout = recipe.rollout.model_copy(update=dict(precision=chosen, quant_map=None))
    # The reference is the learner without FP8.
    plain = dict(fp8_emulation=False, precision="fp32" if recipe.learner.precision == "fp32" else "bf16")
    return recipe.model_copy(update=dict(rollout=rollout, learner=recipe.learner.model_copy(update=plain)))


def recorded_rows(run: RunDirectory, num_rows: int, row_tokens: int) -> RecordedRows | None:
    """Return samples from all over the newest batch, responses cut to `row_tokens`; None without a batch. Raises
    RecipeError when the sampled tokens belong to fewer than two prompts."""
    store = BatchStore(run.batches)
    committed = store.committed()
    if not committed:
        return None
    batch = store.read(committed[-1], None)
    rows = {}
    for sample, (first, last) in enumerate(pairwise(batch.response_offsets.tolist())):
        sampled = batch.loss_mask[first:last][:row_tokens].tolist()
        tokens = batch.sample_tokens(sample)[: batch.prompt_lengths[sample] + row_tokens].tolist()
        if any(sampled):
            rows[sample] = ScoredRow(tokens=tokens, sampled=sampled, group=int(batch.group[sample]))
    # Samples of one prompt are adjacent, so take them from all over the batch.
    samples, places = list(rows), {index * len(rows) // num_rows for index in range(num_rows)} if rows else set[int]()
    chosen = {samples[place]: rows[samples[place]] for place in sorted(places)}
    if (count := len({row.group for row in chosen.values()})) < 2:
        raise RecipeError(
            f"{num_rows} rows of batch {batch.index} have sampled tokens of {count} prompts, expected at least 2, as "
            "every other prompt is held out; raise --rows, wait for another batch, or name the run's recipe"
        )
    return RecordedRows(batch=batch.index, samples=list(chosen), rows=list(chosen.values()))


def prompts_of(source: Path, recipe: Recipe, num_rows: int) -> list[list[int]]:
    """Return the first prompts of the recipe's run, or random tokens for a model without a recipe."""
    if (source / "config.json").exists():
        vocabulary = int(read_hf_config(recipe.model.path)["vocab_size"])
        generator = random.Random(0)
        return [[generator.randrange(vocabulary) for _ in range(PROMPT_TOKENS)] for _ in range(num_rows)]
    prompts = build_prompts(recipe, build_tokenizer(recipe))
    return [list(prompts.prompt(group).tokens) for group in range(num_rows)]


def in_ranks(recipe: Recipe, job: dict[str, Any]) -> dict[str, Any]:
    """Run `rank_groups_of` (launch.quant_map.ranks) in the recipe's layout, and return its result."""
    with tempfile.TemporaryDirectory(prefix="evenkeel-quant-map-") as scratch:
        run = RunDirectory(Path(scratch))
        run.logs.mkdir()
        run.freeze(recipe)
        (run.path / "job.json").write_text(json.dumps(job), encoding="utf-8")
        command = torchrun(recipe.learner.num_processes, "launch.quant_map.ranks", scratch)
        groups = 4 * ModelConfig.from_hf(read_hf_config(recipe.model.path)).num_layers
        deadline = recipe.learner.step_deadline_s * (2 + 3 * groups)
        run_ranks(run, command, log=run.logs / "ranking.log", env=child_environment(), deadline_s=deadline)
        result: dict[str, Any] = json.loads((run.path / "result.json").read_text(encoding="utf-8"))
    return result


def commented(result: dict[str, Any], source: Path) -> str:
    """Format the map's file, with the measurements as comments."""
    start, held = result["start"], result["rows"]
    lines = [
        f"# Suggested by `evenkeel quant-map suggest {source} --ess-floor {result['ess_floor']:g}`.",
        f"# ESS on {start['num_tokens']} held-out tokens of {held['count']} rows: {start['ess']:.5f} unpromoted,",
        *(f"#   {step['ess']:.5f} with {step['group']} (+{step['extra_bytes']:,} bytes)" for step in result["path"]),
        f"# {'holds' if result['reached'] else 'does not hold'} the floor of {result['ess_floor']:g}.",
    ]
    return "\n".join(lines) + "\n" + QuantMapFile.model_validate(result["quant_map"]).to_yaml()


def judged(
    score: Score, quant: QuantMap, rows: Sequence[ScoredRow], *, costs: Mapping[str, int], ess_floor: float
) -> dict[str, Any]:
    """Rank and promote groups. The result has ess_floor, reached, start and gap (a Gap), ranking and path (an entry per
    group, with its damage or cost), quant_map (as its file). `costs` are bytes by group."""
    chosen, held_out = halves(rows)
    ranked = rank_groups(score, quant, chosen=chosen)
    found = promote_greedily(score, quant, ranked, ess_floor=ess_floor, extra_bytes=costs, held_out=held_out)
    return dict(
        ess_floor=ess_floor,
        reached=found.reached,
        start=asdict(found.start),
        gap=asdict(found.gap),
        ranking=[
            dict(
                group=one.group.name,
                damage=one.damage,
                extra_bytes=costs[one.group.name],
                alone=asdict(one.alone),
                promoted=asdict(one.promoted),
            )
            for one in ranked
        ],
        path=[dict(group=step.group.name, extra_bytes=step.extra_bytes, **asdict(step.gap)) for step in found.path],
        quant_map=found.quant_map.to_file().model_dump(mode="json"),
    )


@dataclass(frozen=True, kw_only=True)
class ScoredRow:
    """A sample, or its beginning, as sent through JSON."""

    tokens: list[int]
    sampled: list[bool]
    """[response tokens] False for tokens that no engine sampled."""
    group: int
    """The prompt: equal for all rows of one prompt."""


@dataclass(frozen=True, kw_only=True)
class RecordedRows:
    """Beginnings of a recorded batch's samples; ranks read kept sets and experts, too many for JSON, from the batch."""

    batch: int
    samples: list[int]
    rows: list[ScoredRow]

    def token_rows(self, store: BatchStore) -> TokenRows:
        """Build rows whose responses are scored, with the kept sets and experts that the learner trains with."""
        from megatron_bridge.step.micro_batches import TokenRows

        batch = store.read(self.batch, None)
        chosen = batch.select(np.isin(np.arange(batch.num_samples), self.samples))
        return TokenRows.of_batch(chosen).beginnings(np.array([len(row.tokens) for row in self.rows], np.int64))


def token_rows(rows: Sequence[ScoredRow]) -> TokenRows:
    from megatron_bridge.step.micro_batches import TokenRows

    return TokenRows(
        tokens=[np.array(row.tokens, np.int32) for row in rows],
        starts=np.array([len(row.tokens) - len(row.sampled) for row in rows], np.int64),
    )


def halves(rows: Sequence[ScoredRow]) -> tuple[Tensor, Tensor]:
    """Return two masks [response tokens of all rows]: sampled tokens of every other prompt, and the held-out rest."""
    prompts = sorted({row.group for row in rows})
    second = torch.tensor([prompts.index(row.group) % 2 == 1 for row in rows for _ in row.sampled])
    sampled = torch.tensor([*chain.from_iterable(row.sampled for row in rows)])
    return sampled & ~second, sampled & second


SHOWN = 12
"""The most groups of a ranking that are printed."""


def read_map(file: Path, model: Path | None) -> dict[str, Any]:
    """Return a map's base and exceptions; with a model also quantized_share and the bytes of its linear layers, as
    mapped and in BF16. Raises RecipeError for a damaged map and for modules that the model lacks."""
    try:
        read = QuantMapFile.read(file)
        result: dict[str, Any] = dict(base=read.base, exceptions=dict(read.exceptions))
        if model is None:
            return result
        config = ModelConfig.from_hf(read_hf_config(model))
        quant = QuantMap.from_file(read, config.num_layers, None if config.experts is None else config.experts.count)
    except ValueError as error:
        raise RecipeError(str(error)) from error
    shapes = config.tensors()
    counts = {module: math.prod(shapes[f"{module}.weight"]) for group in quant.fused_groups for module in group}
    quantized = sum(count for module, count in counts.items() if module in quant.formats)
    whole = sum(counts.values())
    return result | dict(
        quantized_share=quantized / whole,
        linear_bytes=quantized + 2 * (whole - quantized),
        linear_bytes_in_bf16=2 * whole,
    )


def print_map(result: dict[str, Any]) -> None:
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
    from rich.console import Console
    from rich.table import Table

    console = Console()
    table = Table(title="Each group: KL (nats) and ESS when it alone is quantized; ESS without it", box=None)
    # The names fill the rest of 80 columns.
    for title in ("group", "KL", "ESS", "ESS without", "MiB more"):
        table.add_column(title, justify="left" if title == "group" else "right", no_wrap=True)
    for one in result["ranking"][:SHOWN]:
        cells = [f"{one['damage']:.1e}", f"{one['alone']['ess']:.5f}", f"{one['promoted']['ess']:.5f}"]
        cells.append(f"{one['extra_bytes'] / 2**20:.2f}")
        table.add_row(one["group"].removeprefix("model."), *cells)
    console.print(table)
    left = len(result["ranking"]) - SHOWN
    if left > 0:
        console.print(f"… and {left} more groups")
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

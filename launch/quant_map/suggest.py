"""`evenkeel quant-map suggest`: rank layer groups by emulation, promote the worst, write the map.

rows      a run's newest batch, or sampled from the model by transformers   one child process (launch.quant_map.rows)
ranking   learner in ranks, Megatron's own layers, formats emulated          torchrun          (…suggest_ranks)
modelopt  auto_quantize on the transformers model, if asked                  one child process (…rows)
"""

from __future__ import annotations

import json
import random
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Any

from launch.build.components import build_prompts, build_tokenizer, quant_map_of
from launch.convert.jobs import run_job
from launch.quant_map.scored_rows import RecordedRows, ScoredRow
from launch.recipe_options import check_recipe_or_run
from launch.run.processes import child_environment, run_ranks, torchrun
from megatron_bridge.hf.model_config import ModelConfig, read_hf_config
from pipeline.config.loader import load_recipe, recipe_from
from pipeline.config.recipe import Recipe
from pipeline.data.files import write_atomically
from pipeline.data.run_directory import RunDirectory
from pipeline.data.store import BatchStore
from pipeline.errors import ModelError, RecipeError
from precision.formats.quant_map_file import QuantMapFile

PROMPT_TOKENS = 16
"""Of random prompts, when there is nothing but a model."""


def suggest(
    source: Path,
    out: Path | None,
    *,
    ess_floor: float,
    precision: str | None,
    num_rows: int,
    row_tokens: int,
    modelopt: bool,
    overrides: Sequence[str],
) -> dict[str, Any]:
    """See the module's head; the keys are those of `launch.quant_map.suggest_ranks.measure`, `rows`, `modelopt` and
    `out`. Raises RecipeError or ModelError."""
    if out is not None and out.exists():
        raise RecipeError(f"--out {out} exists already; remove it or name another file")
    if out is not None and not out.parent.is_dir():
        raise RecipeError(f"--out {out}: {out.parent} is no folder; make it or name another file")
    run = RunDirectory(source) if (source / "recipe.yaml").exists() else None
    recipe = recipe_of(source, run, precision, overrides)
    if modelopt and ModelConfig.from_hf(read_hf_config(recipe.model.path)).experts is not None:
        raise ModelError(f"--modelopt: {recipe.model.path} has experts, its ranking knows dense models; leave it out")
    recorded = None if run is None else recorded_rows(run, num_rows, row_tokens)
    prompts = [] if recorded else prompts_of(source, recipe, num_rows)
    child: dict[str, Any] = dict(
        source=str(recipe.model.path.resolve()),
        rows=None if recorded is None else [asdict(row) for row in recorded.rows],
        prompts=prompts,
        row_tokens=row_tokens,
        temperature=recipe.rollout.temperature,
        format=recipe.rollout.precision if modelopt else None,
    )
    size = sum(path.stat().st_size for path in recipe.model.path.glob("*.safetensors"))
    found = run_job("launch.quant_map.rows", child, None, size * num_rows) if modelopt or recorded is None else {}
    rows: list[dict[str, Any]] = found["rows"] if recorded is None else child["rows"]
    source_run = None if run is None else str(run.path.resolve())
    recorded_in = {} if recorded is None else dict(batch=recorded.batch, samples=recorded.samples)
    result = in_ranks(recipe, dict(rows=rows, ess_floor=ess_floor, run=source_run, **recorded_in))
    scored = sum(sum(row["sampled"]) for row in rows)
    result["rows"] = dict(count=len(rows), tokens=scored, sampled_by="engine" if recorded else "model")
    if modelopt:
        result["modelopt"] = compare(result["ranking"], found["scores"], recipe)
    result["out"] = None if out is None else str(out)
    if out is not None:
        write_atomically(out, commented(result, source))
    return result


def recipe_of(source: Path, run: RunDirectory | None, precision: str | None, overrides: Sequence[str]) -> Recipe:
    """A recipe whose rollouts are in the format to start from, without a map. Raises RecipeError."""
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
    # The reference is the learner without FP8 of its own.
    plain = dict(fp8_emulation=False, precision="fp32" if recipe.learner.precision == "fp32" else "bf16")
    return recipe.model_copy(update=dict(rollout=rollout, learner=recipe.learner.model_copy(update=plain)))


def recorded_rows(run: RunDirectory, num_rows: int, row_tokens: int) -> RecordedRows | None:
    """Samples of the newest batch, of long responses the beginning; None: nothing is committed yet. Raises RecipeError
    for a batch with sampled tokens of fewer than two prompts."""
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
    # Samples of one prompt are adjacent: take them from all over the batch.
    samples, places = list(rows), {index * len(rows) // num_rows for index in range(num_rows)} if rows else set[int]()
    chosen = {samples[place]: rows[samples[place]] for place in sorted(places)}
    if (count := len({row.group for row in chosen.values()})) < 2:
        raise RecipeError(
            f"{num_rows} rows of batch {batch.index} have sampled tokens of {count} prompts, expected at least 2, as "
            "every other prompt is held out; raise --rows, wait for another batch, or name the run's recipe"
        )
    return RecordedRows(batch=batch.index, samples=list(chosen), rows=list(chosen.values()))


def prompts_of(source: Path, recipe: Recipe, num_rows: int) -> list[list[int]]:
    """The first prompts of the recipe's run; of a model alone, random tokens."""
    if (source / "config.json").exists():
        vocabulary = int(read_hf_config(recipe.model.path)["vocab_size"])
        generator = random.Random(0)
        return [[generator.randrange(vocabulary) for _ in range(PROMPT_TOKENS)] for _ in range(num_rows)]
    prompts = build_prompts(recipe, build_tokenizer(recipe))
    return [list(prompts.prompt(group).tokens) for group in range(num_rows)]


def in_ranks(recipe: Recipe, job: dict[str, Any]) -> dict[str, Any]:
    """Run `launch.quant_map.suggest_ranks` in the recipe's layout."""
    with tempfile.TemporaryDirectory(prefix="evenkeel-quant-map-") as scratch:
        run = RunDirectory(Path(scratch))
        run.logs.mkdir()
        run.freeze(recipe)
        (run.path / "job.json").write_text(json.dumps(job), encoding="utf-8")
        command = torchrun(recipe.learner.num_processes, "launch.quant_map.suggest_ranks", scratch)
        groups = 4 * ModelConfig.from_hf(read_hf_config(recipe.model.path)).num_layers
        deadline = recipe.learner.step_deadline_s * (2 + 3 * groups)
        run_ranks(run, command, log=run.logs / "ranking.log", env=child_environment(), deadline_s=deadline)
        result: dict[str, Any] = json.loads((run.path / "result.json").read_text(encoding="utf-8"))
    return result


def compare(ranking: Sequence[dict[str, Any]], scores: Sequence[dict[str, Any]], recipe: Recipe) -> dict[str, Any]:
    """ModelOpt's scores under our names, and how far both orders agree. Raises ModelError for groups that differ."""
    from precision.mismatch.sensitivity import rank_agreement

    whole = quant_map_of(recipe, QuantMapFile(base=recipe.rollout.precision))
    name_of = {module: name for name, modules in whole.groups.items() for module in modules}
    theirs: dict[str, float] = {}
    for one in scores:
        names = {name_of[module] for module in one["modules"] if module in name_of}
        if len(names) != 1:
            raise ModelError(f"ModelOpt groups {', '.join(one['modules'])}, which engines do not; report the model")
        theirs[names.pop()] = one["score"]
    order = sorted(theirs, key=lambda name: -theirs[name])
    ours = [one["group"] for one in ranking]
    return dict(ranking=[dict(group=name, score=theirs[name]) for name in order], agreement=rank_agreement(ours, order))


def commented(result: dict[str, Any], source: Path) -> str:
    """The map's file, with what was measured as comments."""
    start, held = result["start"], result["rows"]
    lines = [
        f"# Suggested by `evenkeel quant-map suggest {source} --ess-floor {result['ess_floor']:g}`.",
        f"# ESS on {start['num_tokens']} held-out tokens of {held['count']} rows: {start['ess']:.5f} unpromoted,",
        *(f"#   {step['ess']:.5f} with {step['group']} (+{step['extra_bytes']:,} bytes)" for step in result["path"]),
        f"# {'holds' if result['reached'] else 'does not hold'} the floor of {result['ess_floor']:g}.",
    ]
    return "\n".join(lines) + "\n" + QuantMapFile.model_validate(result["quant_map"]).to_yaml()

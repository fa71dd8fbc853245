"""Run the child processes of `quant-map suggest`: sample rows with transformers, or score rows as a learner rank.

All ranks have the same scores, so they decide alike.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from launch.build.components import quant_map_of
from launch.build.learner import build_learner
from launch.quant_map.suggest import RecordedRows, ScoredRow, judged, token_rows
from launch.run.processes import run_child
from megatron_bridge.step.host_weights import row_scorer
from pipeline.child_process import die_with_parent
from pipeline.data.files import write_atomically
from pipeline.data.run_directory import RunDirectory
from pipeline.data.store import BatchStore
from pipeline.errors import ModelError
from pipeline.trainer.checkpoints import Checkpoints
from precision.formats.quant_map import QuantMapFile
from precision.mismatch.sensitivity import layer_groups

FP8_BYTES = 1
"""Bytes of an FP8 weight. Scales, a few per thousand, are left out."""


def rank_groups_of(run: RunDirectory) -> None:
    """Write the result of `judged`, and the checkpoint's version, into result.json. Collective."""
    recipe, job = run.recipe(), json.loads((run.path / "job.json").read_text(encoding="utf-8"))
    # Formats are emulated in Megatron's own layers only.
    learner = build_learner(recipe, layers="megatron")
    version, rows = 0, [ScoredRow(**row) for row in job["rows"]]
    scored = token_rows(rows)
    if job["run"] is not None:
        source = RunDirectory(Path(job["run"]))
        version, _ = Checkpoints(source.checkpoints, keep=1).restore(learner)
        if "batch" in job:
            recorded = RecordedRows(batch=job["batch"], samples=job["samples"], rows=rows)
            scored = recorded.token_rows(BatchStore(source.batches))
    quant = quant_map_of(recipe, QuantMapFile(base=recipe.rollout.precision))
    # The additional bytes of an engine that leaves a group unquantized.
    full = 4 if recipe.learner.precision == "fp32" else 2
    shapes = learner.model_config.tensors()
    costs = {
        group.name: (full - FP8_BYTES) * sum(math.prod(shapes[f"{module}.weight"]) for module in group.modules)
        for group in layer_groups(quant)
    }
    found = judged(row_scorer(learner, scored), quant, rows, costs=costs, ess_floor=job["ess_floor"])
    if torch.distributed.get_rank() == 0:
        write_atomically(run.path / "result.json", json.dumps(dict(version=version, **found)))
    torch.distributed.barrier()


def sample_rows(run: RunDirectory) -> None:
    """Sample a response to each prompt of job.json (source, prompts, row_tokens, temperature) into result.json, in a
    separate process, since transformers loads the model whole."""
    from transformers import AutoModelForCausalLM

    job = json.loads((run.path / "job.json").read_text(encoding="utf-8"))
    model = AutoModelForCausalLM.from_pretrained(job["source"], dtype="auto").eval()
    rows = sampled(model, job["prompts"], job["row_tokens"], job["temperature"])
    write_atomically(run.path / "result.json", json.dumps(dict(rows=[asdict(row) for row in rows])))


def sampled(model: Any, prompts: Sequence[list[int]], row_tokens: int, temperature: float) -> list[ScoredRow]:
    """Sample a response to each prompt, up to the end token, `row_tokens` or the context. Raises ModelError."""
    from transformers import GenerationConfig

    torch.manual_seed(0)
    # transformers takes unset arguments from the folder's generation_config.json, where a repetition penalty, for
    # example, would change the distribution.
    own = model.generation_config
    model.generation_config = GenerationConfig(eos_token_id=own.eos_token_id, pad_token_id=own.pad_token_id)
    context = model.config.max_position_embeddings
    rows = []
    for group, prompt in enumerate(prompts):
        if len(prompt) >= context:
            raise ModelError(
                f"prompt {group} has {len(prompt)} tokens, and the model's context {context}; cut the data's prompts"
            )
        longest = min(len(prompt) + row_tokens, context)
        settings = dict(do_sample=True, temperature=temperature, top_k=0, top_p=1.0, max_length=longest)
        mask = torch.ones(1, len(prompt), dtype=torch.long)
        (row,) = model.generate(torch.tensor([prompt]), attention_mask=mask, **settings).tolist()
        rows.append(ScoredRow(tokens=row, sampled=[True] * (len(row) - len(prompt)), group=group))
    return rows


if __name__ == "__main__":
    die_with_parent()
    directory = RunDirectory(Path(sys.argv[1]))
    if (directory.path / "recipe.yaml").exists():
        run_child(directory, "ranking", lambda: rank_groups_of(directory))
    run_child(directory, "sampling", lambda: sample_rows(directory))

"""Child process of `quant-map suggest` that works on the transformers model: it samples rows, and asks ModelOpt.

A process of its own, because ModelOpt patches torch and transformers when it is imported.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from launch.quant_map.scored_rows import ScoredRow
from launch.run.processes import run_child
from pipeline.child_process import die_with_parent
from pipeline.data.files import write_atomically
from pipeline.data.run_directory import RunDirectory
from pipeline.errors import ModelError

SEED = 0


def work(run: RunDirectory) -> None:
    """job.json names source, rows (of ScoredRow) or prompts, row_tokens, temperature and, for ModelOpt, format;
    result.json gets rows and scores."""
    from transformers import AutoModelForCausalLM

    job = json.loads((run.path / "job.json").read_text(encoding="utf-8"))
    model = AutoModelForCausalLM.from_pretrained(job["source"], dtype="auto").eval()
    sample = None if job["rows"] else sampled(model, job["prompts"], job["row_tokens"], job["temperature"])
    rows = job["rows"] if sample is None else [asdict(row) for row in sample]
    scores = None
    if job["format"] is not None:
        from megatron_bridge.hf.modelopt import auto_quantize_scores

        scores = auto_quantize_scores(model, [row["tokens"] for row in rows], job["format"])
    write_atomically(run.path / "result.json", json.dumps(dict(rows=rows, scores=scores)))


def sampled(model: Any, prompts: Sequence[list[int]], row_tokens: int, temperature: float) -> list[ScoredRow]:
    """Each prompt and a response, sampled from the whole vocabulary, up to the end token, to `row_tokens` tokens of it,
    or to the model's context. Raises ModelError for a prompt that fills that."""
    from transformers import GenerationConfig

    torch.manual_seed(SEED)
    # The rest of the folder's generation_config.json, such as a repetition penalty, would change the distribution:
    # transformers takes from there whatever a call leaves open.
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
    run_child(directory, "sampling", lambda: work(directory))

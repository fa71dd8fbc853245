"""Child process of `quant-map suggest` that works on the transformers model: it samples rows, and asks ModelOpt.

A process of its own, because ModelOpt patches torch and transformers when it is imported.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from launch.run.processes import run_child
from pipeline.child_process import die_with_parent
from pipeline.data.files import write_atomically
from pipeline.data.run_directory import RunDirectory

SEED = 0


def work(run: RunDirectory) -> None:
    """job.json names source, rows or prompts, row_tokens, temperature and, for ModelOpt, format; result.json gets
    rows and scores."""
    from transformers import AutoModelForCausalLM

    job = json.loads((run.path / "job.json").read_text())
    model = AutoModelForCausalLM.from_pretrained(job["source"], dtype="auto").eval()
    rows = job["rows"] or sampled(model, job["prompts"], job["row_tokens"], job["temperature"])
    scores = None
    if job["format"] is not None:
        from megatron_bridge.hf.modelopt import auto_quantize_scores

        scores = auto_quantize_scores(model, rows, job["format"])
    write_atomically(run.path / "result.json", json.dumps(dict(rows=rows, scores=scores)))


def sampled(model: Any, prompts: Sequence[list[int]], row_tokens: int, temperature: float) -> list[list[int]]:
    """Each prompt and a response, sampled from the whole vocabulary, up to the end token or the longest row."""
    torch.manual_seed(SEED)
    rows = []
    for prompt in prompts:
        settings = dict(do_sample=True, temperature=temperature, top_k=0, top_p=1.0, max_length=row_tokens)
        start = prompt[: row_tokens - 1]
        mask = torch.ones(1, len(start), dtype=torch.long)
        (row,) = model.generate(torch.tensor([start]), attention_mask=mask, **settings).tolist()
        rows.append(row)
    return rows


if __name__ == "__main__":
    die_with_parent()
    directory = RunDirectory(Path(sys.argv[1]))
    run_child(directory, "sampling", lambda: work(directory))

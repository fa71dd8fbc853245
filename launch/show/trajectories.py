"""`evenkeel trajectories show RUN BATCH`."""

from __future__ import annotations

from pathlib import Path

from launch.build.components import build_tokenizer
from pipeline.analysis.trajectories import render_batch
from pipeline.data.run_directory import RunDirectory
from pipeline.data.store import BatchStore


def show(path: Path, index: int, limit: int) -> None:
    """Print the first `limit` samples of a batch; with logprob gaps once the learner has met the batch."""
    run = RunDirectory(path)
    tokenizer = build_tokenizer(run.recipe())
    batch = BatchStore(run.batches).read(index, None)
    learner_logprobs = run.learner_logprobs(index, len(batch.rollout_logprobs))
    if learner_logprobs is None:
        print(f"batch {index} is not trained yet: no learner logprobs to compare with")
    samples = range(min(limit, batch.num_samples))
    for line in render_batch(batch, tokenizer, learner_logprobs=learner_logprobs, samples=samples):
        print(line)

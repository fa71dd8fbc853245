"""What a data parallel rank reads and holds of a batch, as shares of what one rank alone does. Needs no GPU.

Each rank of 1, 2 and 4 waits for one committed batch as the trainer does (pipeline.trainer.batch_source), one rank
after another in this process; ranks exchange numbers in place, which is left out. The sizes take turns. The largest of
the ranks; the median of the repetitions, and in brackets their range.

    read   bytes of the file that it asks for ÷ bytes of the file
    peak   most memory that was allocated at once while it read ÷ the same of one rank alone
    held   memory of the batch afterwards ÷ the same of one rank alone

`routes` has the experts of 48 layers for each token, `dense` has none. What the learner itself holds of a whole step,
a few vectors of one number for each response token, is not in it.

`mismatch` is what a rank of all ranks needs to measure the mismatch of a step of the dense batch: the
memory that is allocated at once, and processor time; sums over ranks are left out.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import tempfile
import time
import tracemalloc
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from numpy.typing import NDArray
from torch.profiler import ProfilerActivity, profile

from megatron_bridge.step.micro_batches import Split, deal
from pipeline.data.batch import Batch, Share
from pipeline.data.routed_experts import RoutedExperts
from pipeline.data.run_directory import RunDirectory
from pipeline.data.store import BatchStore
from pipeline.trainer.batch_source import BatchSource
from precision.mismatch.statistics import Mismatch
from precision.mismatch.step_tokens import StepTokens
from precision.ranks import Ranks
from tests.support.batches import batch_of_rewards
from tests.support.counted_file import CountedFile
from tests.support.one_rank import OneRank

SAMPLES, PROMPT_TOKENS = 384, 128
LAYERS, PER_TOKEN, EXPERTS = 48, 8, 128
RANKS = (1, 2, 4)
REPETITIONS = 3


@dataclass(frozen=True)
class RankOf(OneRank):
    """One data parallel rank of several, without the others."""

    split: Split

    @property
    def num_data_ranks(self) -> int:  # type: ignore[override]
        return self.split.data_ranks

    def share(self, lengths: NDArray[np.int64], together: Sequence[NDArray[np.bool_]]) -> Share:
        return Share(ranks=deal(lengths, self.split, together), rank=self.split.data_rank)

    def sum_of_shares(self, values: NDArray[Any]) -> NDArray[Any]:
        return values


def batch(*, median: int, routes: bool) -> Batch:
    """Lengths as a reasoning model's, lognormal, in groups of eight."""
    draw = np.random.default_rng(0)
    responses = np.clip(draw.lognormal(np.log(median), 0.8, SAMPLES), 16, 8 * median).astype(np.int64)
    count, total = int(responses.sum()), int(responses.sum()) + SAMPLES * PROMPT_TOKENS
    experts = None
    if routes:
        # Neighbors, so that no row names an expert twice.
        first = draw.integers(0, EXPERTS - PER_TOKEN, (total, LAYERS, 1), dtype=np.uint8)
        ids = first + np.arange(PER_TOKEN, dtype=np.uint8)
        experts = RoutedExperts(ids=ids, known=np.ones(total, np.bool_))
    return replace(
        batch_of_rewards([[1.0, 0.0] * 4] * (SAMPLES // 8)),
        tokens=draw.integers(0, 150_000, total, dtype=np.int32),
        sample_offsets=np.concatenate([[0], np.cumsum(responses + PROMPT_TOKENS)]),
        prompt_lengths=np.full(SAMPLES, PROMPT_TOKENS, np.int32),
        rollout_logprobs=-draw.exponential(0.3, count).astype(np.float32),
        policy_version=np.zeros(count, np.int32),
        loss_mask=np.ones(count, np.bool_),
        experts=experts,
    )


def measure(run: RunDirectory, split: Split) -> dict[str, float]:
    """Bytes that one rank reads, and those that it allocates."""
    CountedFile.num_bytes = 0
    gc.collect()
    tracemalloc.start()
    learner: Any = RankOf(split)
    source = BatchSource(
        run=run,
        store=BatchStore(run.batches),
        learner=learner,
        contract=None,  # type: ignore[arg-type]
        wait_deadline_s=60.0,
    )
    found = source.wait(0)
    assert found is not None
    gc.collect()
    held, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return dict(read=CountedFile.num_bytes, peak=peak, held=held)


def largest(run: RunDirectory, ranks: int) -> dict[str, float]:
    """Of all ranks of a layout."""
    every = [measure(run, Split(data_ranks=ranks, data_rank=rank)) for rank in range(ranks)]
    return {name: max(one[name] for one in every) for name in every[0]}


def turns(folder: Path, made: Batch) -> dict[str, dict[str, list[float]]]:
    """Ranks → figure → its ratio, for each repetition."""
    run = RunDirectory(folder)
    run.make_folders()
    size = BatchStore(run.batches).commit(made).stat().st_size
    found: dict[str, dict[str, list[float]]] = {f"DP {ranks}": {"read": [], "peak": [], "held": []} for ranks in RANKS}
    for _ in range(REPETITIONS):
        one: dict[str, float] = {}
        for ranks in RANKS:
            figures = largest(run, ranks)
            one = one or figures
            read = 1.0 if ranks == 1 else figures["read"] / size  # one alone reads the file at once
            ratios = dict(read=read, **{name: figures[name] / one[name] for name in ("peak", "held")})
            for name, value in ratios.items():
                found[f"DP {ranks}"][name].append(value)
    return found


def mismatch_figures(tokens: StepTokens, ranks: int) -> dict[str, float]:
    """Of the first rank, which has most of the chunks."""
    first = Ranks(rank=0, size=ranks, sum=lambda values: values)
    began = time.process_time()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        Mismatch.of_step(tokens, first)
    seconds, allocated, peak = time.process_time() - began, 0, 0
    assert profiled.profiler is not None
    for event in profiled.profiler.kineto_results.events():
        if event.name() == "[memory]":
            allocated += event.nbytes()
            peak = max(peak, allocated)
    return dict(peak=peak, processor=seconds)


def mismatch_turns(made: Batch) -> dict[str, dict[str, list[float]]]:
    """As `turns`."""
    offsets = torch.from_numpy(made.response_offsets)
    rollout = torch.from_numpy(made.rollout_logprobs)
    noise = torch.randn(len(rollout), generator=torch.Generator().manual_seed(0))
    tokens = StepTokens(
        learner_logprobs=rollout + 0.02 * noise,
        rollout_logprobs=rollout,
        seen=torch.ones(len(rollout), dtype=torch.bool),
        advantages=noise,
        entropy=-rollout,
        age=torch.zeros(len(rollout), dtype=torch.int32),
        offsets=offsets,
    )
    found: dict[str, dict[str, list[float]]] = {f"DP {ranks}": {"peak": [], "processor": []} for ranks in RANKS}
    mismatch_figures(tokens, 1)  # what is loaded at the first use is no rank's
    for _ in range(REPETITIONS):
        one: dict[str, float] = {}
        for ranks in RANKS:
            figures = mismatch_figures(tokens, ranks)
            one = one or figures
            for name, value in figures.items():
                found[f"DP {ranks}"][name].append(value / one[name])
    return found


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()

    def counted(path: Path) -> Any:
        return CountedFile(path.open("rb", buffering=0))

    results = {}
    with patch("pipeline.data.zarr_zip.open_regular", counted):
        for name, made in (("routes", batch(median=1024, routes=True)), ("dense", batch(median=4096, routes=False))):
            with tempfile.TemporaryDirectory() as folder:
                results[name] = turns(Path(folder), made)
            tell(name, results[name])
    results["mismatch"] = mismatch_turns(batch(median=4096, routes=False))
    tell("mismatch", results["mismatch"])
    print(json.dumps(results))


def tell(name: str, figures: dict[str, dict[str, list[float]]]) -> None:
    for ranks, of_ranks in figures.items():
        print(f"{name}, {ranks}: {', '.join(f'{key} {text(values)}' for key, values in of_ranks.items())}")


def text(values: Sequence[float]) -> str:
    return f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


if __name__ == "__main__":
    main()

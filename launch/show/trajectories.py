"""What `evenkeel trajectories` prints and writes."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from launch.terminal import counted
from pipeline.analysis.trajectories import SAMPLE_COLUMNS, Background, render_batch, sample_rows, tokenizer_of
from pipeline.data.batch import Batch
from pipeline.data.files import replacing
from pipeline.data.run_directory import RunDirectory
from pipeline.data.run_recipes import newest_recipe
from pipeline.data.store import BatchStore
from pipeline.errors import MachineError, RecipeError, StoreError
from pipeline.importing import pip_install
from pipeline.tasks.tokenizer import Tokenizer

Rows = list[dict[str, Any]]


@dataclass(frozen=True, kw_only=True)
class Filter:
    """Which samples are kept; None keeps all."""

    first: int | None = None
    end: int | None = None
    """Steps from `first` to `end` - 1."""
    reward_min: float | None = None
    reward_max: float | None = None
    """Both inclusive. With one of them, a sample without a reward is left out."""
    search: str | None = None
    """A text that prompt or response holds, in this spelling."""
    finish: str | None = None
    """One of pipeline.data.batch.FINISH_REASONS; no batch holds `abort`."""
    source: str | None = None
    """One of the task's sources."""

    def has_step(self, step: int) -> bool:
        """Whether samples of this step may be kept."""
        return (self.first is None or step >= self.first) and (self.end is None or step < self.end)

    def has_row(self, row: dict[str, Any]) -> bool:
        """Whether a row of pipeline.analysis.trajectories.sample_rows is kept."""
        named = ((self.finish, row["finish"]), (self.source, row["source"]))
        if any(wanted is not None and wanted != found for wanted, found in named):
            return False
        reward = row["reward"]
        if reward is None and not (self.reward_min is None and self.reward_max is None):
            return False
        if (self.reward_min is not None and reward < self.reward_min) or (
            self.reward_max is not None and reward > self.reward_max
        ):
            return False
        return self.search is None or self.search in row["prompt"] or self.search in row["response"]


@dataclass
class _Reader:
    """Rows of a run's batches."""

    path: Path
    run: RunDirectory = field(init=False)
    model: Path = field(init=False)
    store: BatchStore = field(init=False)
    background: Background = field(init=False)
    _tokenizers: dict[str, Tokenizer] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self.run = RunDirectory(self.path)
        self.model = newest_recipe(self.path).model.path
        self.store = BatchStore(self.run.batches)
        self.background = Background(self.path)

    def tokenizer(self, batch: Batch) -> Tokenizer:
        """The one that it was sampled with. Raises ModelError."""
        sha256 = batch.contract.tokenizer_sha256
        if sha256 not in self._tokenizers:
            self._tokenizers[sha256] = tokenizer_of(self.run, self.model, sha256)
        return self._tokenizers[sha256]

    def rows(self, index: int) -> Iterator[dict[str, Any]]:
        batch = self.store.read(index, None)
        learner_logprobs = self.run.learner_logprobs(index, len(batch.rollout_logprobs))
        return sample_rows(batch, self.tokenizer(batch), self.background, learner_logprobs=learner_logprobs)


def show(path: Path, index: int, limit: int) -> None:
    """Print the first `limit` samples of a batch; with logprob gaps once the learner has met the batch."""
    reader = _Reader(path)
    batch = reader.store.read(index, None)
    learner_logprobs = reader.run.learner_logprobs(index, len(batch.rollout_logprobs))
    if learner_logprobs is None:
        print(f"batch {index} is not trained yet: no learner logprobs to compare with")
    if reader.background.missing:
        print(reader.background.missing)
    samples = range(min(limit, batch.num_samples))
    for line in render_batch(
        batch,
        reader.tokenizer(batch),
        learner_logprobs=learner_logprobs,
        samples=samples,
        background=reader.background,
    ):
        print(line)


def as_mapping(path: Path, index: int, limit: int) -> dict[str, Any]:
    """The first `limit` samples of a batch as plain values, and how many there are."""
    rows = list(_Reader(path).rows(index))
    return dict(batch=index, num_samples=len(rows), samples=rows[:limit])


def export(path: Path, *, parquet: Path | None, jsonl: Path | None, chosen: Filter) -> dict[str, Any]:
    """Write the chosen samples to the one file that is given; it appears when it is complete.

    Raises RecipeError (no batch in these steps, a source that the run does not have), StoreError (a file that cannot be
    written) and MachineError (no pyarrow).
    """
    reader = _Reader(path)
    _check_source(path, chosen.source)
    committed = reader.store.committed()
    steps = [step for step in committed if chosen.has_step(step)]
    if not committed:
        raise RecipeError(f"{path} has no batch, so nothing to export: nothing was sampled yet, or it is a run of sft")
    if not steps:
        there = f"{committed[0]} to {committed[-1]}"
        raise RecipeError(f"{path} has no batch in these steps; committed are {there}; give others with --steps A:B")
    target, write = (parquet, _parquet) if parquet is not None else (jsonl, _jsonl)
    assert target is not None
    kept = read = 0
    try:
        with replacing(target) as file, write(file) as add, counted("batches", len(steps)) as done:
            for position, step in enumerate(steps):
                rows = list(reader.rows(step))
                wanted = [row for row in rows if chosen.has_row(row)]
                add(wanted)
                read, kept = read + len(rows), kept + len(wanted)
                done(position + 1)
    except OSError as error:
        raise StoreError(f"cannot write {target}: {error.strerror}; choose a file in a folder that exists") from error
    return dict(path=str(target), batches=len(steps), read=read, samples=kept)


def _check_source(path: Path, source: str | None) -> None:
    known = [one.name for one in getattr(newest_recipe(path).task, "sources", ())]
    if source is None or source in known:
        return
    if not known:
        raise RecipeError(f"--source is {source!r}, but the task of {path} has no task.sources; leave --source out")
    raise RecipeError(f"--source is {source!r}, but the sources of {path} are {', '.join(known)}; name one of them")


@contextmanager
def _jsonl(file: BinaryIO) -> Iterator[Callable[[Rows], None]]:
    def add(rows: Rows) -> None:
        file.writelines(json.dumps(row, allow_nan=False, ensure_ascii=False).encode() + b"\n" for row in rows)

    yield add


@contextmanager
def _parquet(file: BinaryIO) -> Iterator[Callable[[Rows], None]]:
    """A row group a batch, so that one batch is held in memory."""
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError as error:
        raise MachineError(f"Parquet needs pyarrow; {pip_install('pyarrow')}, or write --jsonl FILE") from error
    numbers = ("reward", "advantage", "generated_s", "log_ratio_mean", "log_ratio_abs_max")
    texts = ("source", "prompt", "answer", "metadata", "response", "finish")
    types = {name: pa.float64() for name in numbers} | {name: pa.string() for name in texts}
    types |= {"truncated": pa.bool_(), "reward_parts": pa.map_(pa.string(), pa.float64())}
    schema = pa.schema([(name, types.get(name, pa.int64())) for name in SAMPLE_COLUMNS])
    with pq.ParquetWriter(file, schema, compression="zstd") as writer:

        def add(rows: Rows) -> None:
            plain = [
                row
                | dict(
                    reward_parts=list(row["reward_parts"].items()),
                    metadata=None if row["metadata"] is None else json.dumps(row["metadata"], ensure_ascii=False),
                )
                for row in rows
            ]
            writer.write_table(pa.Table.from_pylist(plain, schema=schema))

        yield add

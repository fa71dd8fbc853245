"""Print and export the samples of a run."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from launch.terminal import counted
from pipeline.analysis.samples import SAMPLE_COLUMNS, Background, render_batch, sample_rows, tokenizer_of
from pipeline.data.batch import Batch
from pipeline.data.files import replacing
from pipeline.data.run_directory import RunDirectory
from pipeline.data.run_recipes import recipe_in_force
from pipeline.data.store import BatchStore
from pipeline.errors import MachineError, RecipeError, StoreError
from pipeline.importing import pip_install
from pipeline.tasks.tokenizer import Tokenizer

Rows = list[dict[str, Any]]
Read = tuple[Batch, Tokenizer, NDArray[np.float32] | None]


def read_batches(path: Path, steps: list[int]) -> Iterator[Read]:
    """Yield batches, each with its tokenizer and the learner's log-probabilities. Raises StoreError and ModelError."""
    run, model, tokenizers = RunDirectory(path), recipe_in_force(path).recipe.model.path, dict[str, Tokenizer]()
    for index in steps:
        batch = BatchStore(run.batches).read(index, None)
        sha256 = batch.contract.tokenizer_sha256
        if sha256 not in tokenizers:
            tokenizers[sha256] = tokenizer_of(run, model, sha256)
        yield batch, tokenizers[sha256], run.learner_logprobs(index, batch.num_response_tokens)


def show(path: Path, index: int, limit: int) -> None:
    """Print the first `limit` samples of a batch, with logprob gaps once the learner has scored it."""
    [(batch, tokenizer, learner_logprobs)] = read_batches(path, [index])
    background = Background(path)
    if learner_logprobs is None:
        print(f"batch {index}: no learner logprobs to compare with: not trained yet, or removed by run.keep_logprobs")
    if background.missing:
        print(background.missing)
    for line in render_batch(batch, tokenizer, background, learner_logprobs=learner_logprobs, limit=limit):
        print(line)


def as_mapping(path: Path, index: int, limit: int) -> dict[str, Any]:
    """Return the first `limit` samples of a batch as plain values, and the number of its samples."""
    [(batch, tokenizer, learner_logprobs)] = read_batches(path, [index])
    rows = list(sample_rows(batch, tokenizer, Background(path), learner_logprobs=learner_logprobs))
    return dict(batch=index, num_samples=len(rows), samples=rows[:limit])


def export(
    path: Path,
    target: Path,
    *,
    first: int = 0,
    end: int | None = None,
    reward_min: float | None = None,
    reward_max: float | None = None,
    search: str | None = None,
    finish: str | None = None,
    source: str | None = None,
) -> dict[str, Any]:
    """Write the samples that pass every filter to `target`, by its name as Parquet or JSON Lines; it appears when
    complete.

    Steps go from `first` to `end` - 1. Limits of rewards are inclusive and leave out samples without a reward. `search`
    is a text in prompt or response, in this spelling. Raises RecipeError (no batch in these steps, a source that the
    run does not have), StoreError (a file that cannot be written) and MachineError (no pyarrow).
    """
    known = [one.name for one in getattr(recipe_in_force(path).recipe.task, "sources", ())]
    if source is not None and source not in known:
        if not known:
            raise RecipeError(f"--source is {source!r}, but the task of {path} has no task.sources; leave --source out")
        raise RecipeError(f"--source is {source!r}, but the sources of {path} are {', '.join(known)}; name one of them")
    committed = BatchStore(RunDirectory(path).batches).committed()
    steps = [step for step in committed if step >= first and (end is None or step < end)]
    if not committed:
        raise RecipeError(f"{path} has no batch, so nothing to export: nothing was sampled yet, or it is a run of sft")
    if not steps:
        there = f"{committed[0]} to {committed[-1]}"
        there += " (run.keep_batches removed those before)" if BatchStore(RunDirectory(path).batches).removed() else ""
        raise RecipeError(f"{path} has no batch in these steps; committed are {there}; give others with --steps A:B")

    def is_kept(row: dict[str, Any]) -> bool:
        if finish not in (None, row["finish"]) or source not in (None, row["source"]):
            return False
        reward = row["reward"]
        if reward is None and not (reward_min is None and reward_max is None):
            return False
        if (reward_min is not None and reward < reward_min) or (reward_max is not None and reward > reward_max):
            return False
        return search is None or search in row["prompt"] or search in row["response"]

    write, background = _parquet if target.suffix == ".parquet" else _jsonl, Background(path)
    kept = read = 0
    try:
        with replacing(target) as file, write(file) as add, counted("batches", len(steps)) as done:
            for position, (batch, tokenizer, learner_logprobs) in enumerate(read_batches(path, steps)):
                rows = list(sample_rows(batch, tokenizer, background, learner_logprobs=learner_logprobs))
                wanted = [row for row in rows if is_kept(row)]
                add(wanted)
                read, kept = read + len(rows), kept + len(wanted)
                done(position + 1)
    except OSError as error:
        raise StoreError(f"cannot write {target}: {error.strerror}; choose a file in a folder that exists") from error
    return dict(path=str(target), batches=len(steps), read=read, samples=kept)


@contextmanager
def _jsonl(file: BinaryIO) -> Iterator[Callable[[Rows], None]]:
    def add(rows: Rows) -> None:
        file.writelines(json.dumps(row, allow_nan=False, ensure_ascii=False).encode() + b"\n" for row in rows)

    yield add


@contextmanager
def _parquet(file: BinaryIO) -> Iterator[Callable[[Rows], None]]:
    """Yield a function that writes one row group a batch, so that one batch is held in memory."""
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError as error:
        raise MachineError(f"Parquet needs pyarrow; {pip_install('pyarrow')}, or write a .jsonl file") from error
    numbers = ("reward", "advantage", "generated_s", "log_ratio_mean", "log_ratio_abs_max", "tool_s")
    texts = ("source", "prompt", "answer", "metadata", "response", "finish", "stopped")
    types = {name: pa.float64() for name in numbers} | {name: pa.string() for name in texts}
    said = pa.struct([("kind", pa.string()), ("tokens", pa.int64()), ("text", pa.string())])
    types |= {"said": pa.list_(said), "turn_rewards": pa.list_(pa.float64())}
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

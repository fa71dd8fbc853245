"""A batch is built, checked and written in memory that its arrays bound, in pieces that are small."""

from __future__ import annotations

import tracemalloc
from pathlib import Path
from typing import BinaryIO, cast

import numpy as np

from pipeline.data.batch import Batch, Completion, Group, LogprobContract, Prompt, Sample
from pipeline.data.batch_format import arrays_of
from pipeline.data.batch_values import Limits
from pipeline.data.store import BatchStore
from pipeline.data.zarr_zip import write_zarr_zip

CONTRACT = LogprobContract(temperature=1.0, top_p=1.0, top_k=-1, tokenizer_sha256="")


def groups_of(samples: int, tokens: int) -> list[Group]:
    random = np.random.default_rng(0)

    def sample() -> Sample:
        ids, logprobs = random.integers(0, 150_000, tokens), -random.exponential(0.3, tokens)
        return Sample(completion=Completion.given(ids.tolist(), logprobs.tolist()), reward=1.0)

    prompt = tuple(range(256))
    return [
        Group(prompt=Prompt(group=number, text="", answer="", tokens=prompt), samples=(sample(), sample()))
        for number in range(samples // 2)
    ]


def test_the_memory_of_a_batch_is_built_and_committed_within_twice_its_arrays(tmp_path: Path) -> None:
    groups, store = groups_of(256, 2048), BatchStore(tmp_path, limits=Limits(vocab_size=151_936))
    tracemalloc.start()
    try:
        batch = Batch.from_groups(0, groups, contract=CONTRACT, dropped=(), next_group=len(groups), recipe_sha256="")
        store.commit(batch)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 2.0 * sum(array.nbytes for array in arrays_of(batch).values())


def test_a_file_is_written_chunk_by_chunk() -> None:
    """Nobody holds Python's lock, or memory, for more than a chunk."""

    class Pieces:
        def __init__(self) -> None:
            self.sizes: list[int] = []

        def write(self, data: bytes) -> int:
            self.sizes.append(len(data))
            return len(data)

        def flush(self) -> None:
            """Nothing is held back."""

    random = np.random.default_rng(0)
    arrays = dict(tokens=random.integers(0, 1 << 31, 4 << 20).astype(np.int32), marks=np.ones(4 << 20, np.bool_))
    pieces = Pieces()
    tracemalloc.start()
    try:
        write_zarr_zip(cast(BinaryIO, pieces), {}, arrays)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert sum(pieces.sizes) > 0.9 * arrays["tokens"].nbytes
    assert max(pieces.sizes) < 1.1 * arrays["tokens"].nbytes / 256
    assert peak < 1 << 20

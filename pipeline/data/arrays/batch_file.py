"""A batch out of its file: all of it, or the tokens of the samples that a rank trains on.

attributes ──one digest──▶ dtype, shape and chunk digests of every array
arrays counted in samples ──whole──▶ which samples each rank takes ──▶ the chunks of its tokens
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline.data.arrays.zarr_reader import ZarrFile
from pipeline.data.batch_format import (
    EXPERTS,
    KEPT,
    PER_TOKEN,
    TEACHER_LOGPROBS,
    array_names,
    attributes_sha256,
    batch_from,
    check_batch,
    check_sizes,
)
from pipeline.data.border.attributes import check_attributes
from pipeline.data.records import PER_RESPONSE_TOKEN, Batch
from pipeline.data.share import Share

Choose = Callable[[Batch], Share]
"""From a batch that holds what is counted in samples, and no tokens, to what is wanted of it."""

Runs = Sequence[tuple[int, int]]

_OF_RESPONSES = (*PER_RESPONSE_TOKEN, TEACHER_LOGPROBS)
_COUNTED_IN_TOKENS = (*PER_TOKEN, *KEPT, *EXPERTS, TEACHER_LOGPROBS)


def require_readable(file: ZarrFile) -> None:
    """Raises what reading the file would, as far as attributes and metadata say; no array is read."""
    _attributes(file)


def read_batch(file: ZarrFile) -> Batch:
    """All of a batch. Raises whatever damage makes the checks raise."""
    attributes, digests = _attributes(file)
    batch = batch_from(attributes, {name: file.whole(name, digests[name]) for name in array_names(attributes)})
    check_batch(batch, written=False)
    return batch


def read_num_samples(file: ZarrFile, index: int) -> int:
    """How many samples batch `index` has; no array is read. Raises as `read_batch`, and ValueError for another one."""
    if (found := _attributes(file)[0]["index"]) != index:
        raise ValueError(f"the file holds batch {found}")
    return file.arrays["prompt_lengths"].shape[0]


def read_share(file: ZarrFile, choose: Choose) -> Batch:
    """A batch that holds the chosen samples alone (Batch.share): of the tokens of the others nothing is read but how
    many they are. Raises as `read_batch`."""
    attributes, digests = _attributes(file)
    names = array_names(attributes)
    arrays = {name: file.whole(name, digests[name]) for name in names if name not in _COUNTED_IN_TOKENS}
    offsets = arrays["sample_offsets"] = file.whole("sample_offsets", digests["sample_offsets"])
    lengths, prompts = np.diff(offsets), arrays["prompt_lengths"]
    if lengths.shape != prompts.shape or np.any(prompts < 0) or np.any(lengths < prompts):
        raise ValueError(f"a prompt is longer than its sample, or {len(lengths)} samples have {len(prompts)} prompts")
    responses = np.concatenate([[0], np.cumsum(lengths - prompts)])
    _require_totals(file, names, tokens=int(offsets[-1]), responses=int(responses[-1]))
    read = partial(_of_tokens, file, names, digests, offsets, responses)
    nothing = Share(ranks=np.zeros(len(prompts), np.int64), rank=-1)
    share = choose(batch_from(attributes, arrays | read(nothing.held), nothing))
    batch = batch_from(attributes, arrays | read(share.held), share)
    check_batch(batch, written=False)
    return batch


def _of_tokens(
    file: ZarrFile,
    names: Sequence[str],
    digests: Mapping[str, list[str]],
    offsets: NDArray[np.int64],
    responses: NDArray[np.int64],
    held: NDArray[np.bool_],
) -> dict[str, NDArray[Any]]:
    """The arrays that count tokens, as a batch has them that holds the samples `held` [n]; `offsets` and `responses`
    [n + 1] say where the tokens and the response of each begin."""
    of_tokens, of_responses = (_runs(held, starts) for starts in (offsets, responses))
    found = {name: file.rows(name, of_tokens, digests[name]) for name in names if name in ("tokens", *EXPERTS)}
    own = np.repeat(held, np.diff(responses))
    for name in [name for name in _OF_RESPONSES if name in names]:
        found[name] = np.zeros(len(own), file.arrays[name].dtype)
        found[name][own] = file.rows(name, of_responses, digests[name])
    return found | (_kept(file, of_responses, digests) if KEPT[0] in names else {})


def _attributes(file: ZarrFile) -> tuple[dict[str, Any], dict[str, list[str]]]:
    """The attributes, and the digests of chunks, by array. Raises ValueError when attributes, dtypes or shapes are not
    those that were written."""
    attributes = dict(file.attributes)
    names = array_names(attributes)
    check_attributes(attributes)
    for name in names:
        if name not in file.arrays:
            raise ValueError(f"array {name} is missing")
    check_sizes({name: file.arrays[name].shape for name in names})
    expected = attributes.pop("content_sha256", None)
    if attributes_sha256(attributes) != expected:
        raise ValueError("content digest differs: the attributes were changed")
    return attributes, _digests(file, names, attributes.pop("arrays"))


def _digests(file: ZarrFile, names: Sequence[str], described: Mapping[str, Any]) -> dict[str, list[str]]:
    for name in names:
        layout, said = file.arrays[name], described[name]
        found = (layout.dtype.name, list(layout.shape), layout.num_chunks)
        if found != (said["dtype"], said["shape"], len(said["sha256"])):
            raise ValueError(f"content digest differs: {name} is {layout.dtype.name}{layout.shape}")
    return {name: described[name]["sha256"] for name in names}


def _require_totals(file: ZarrFile, names: Sequence[str], *, tokens: int, responses: int) -> None:
    """Every sample is somewhere in the file, whoever reads it."""
    wanted = dict.fromkeys(("tokens", *EXPERTS), tokens)
    wanted |= dict.fromkeys(_OF_RESPONSES, responses) | {KEPT[0]: responses + 1}
    for name in names:
        rows = file.arrays[name].shape[0]
        if wanted.get(name, rows) != rows:
            raise ValueError(f"{name} has {rows} entries, expected {wanted[name]}")


def _runs(held: NDArray[np.bool_], starts: NDArray[np.int64]) -> list[tuple[int, int]]:
    """Where the `held` samples [n] lie in an array, neighbors together; sample i begins at `starts[i]` [n + 1]."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], held, [False]]).astype(np.int8)))
    return [(int(starts[first]), int(starts[end])) for first, end in edges.reshape(-1, 2)]


def _kept(file: ZarrFile, runs: Runs, digests: Mapping[str, list[str]]) -> dict[str, NDArray[Any]]:
    offsets = [file.rows(KEPT[0], [(start, stop + 1)], digests[KEPT[0]]) for start, stop in runs]
    counts = np.concatenate([np.zeros(0, np.int64), *(np.diff(each) for each in offsets)])
    inside = [(int(each[0]), int(each[-1])) for each in offsets]
    return {
        KEPT[0]: np.concatenate([[0], np.cumsum(counts)]).astype(np.int64),
        KEPT[1]: file.rows(KEPT[1], inside, digests[KEPT[1]]),
    }

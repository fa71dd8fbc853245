"""What a stored batch must look like: arrays, dtypes, attributes, digest, and how the ragged arrays must agree.

Pure functions over `Batch`; the file itself is the business of `pipeline.data.store`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline.data.arrays.chunks import chunk_digests, chunk_rows
from pipeline.data.kept_sets import KeptSets
from pipeline.data.ledger.dropped import PASSED_OVER, DroppedGroup, all_dropped, arrays_of_passed_over
from pipeline.data.records import FINISH_REASONS, Batch, LogprobContract
from pipeline.data.routed_experts import RoutedExperts
from pipeline.data.share import Share

SCHEMA_VERSION = 7
"""Files of another are refused. Raise it when arrays, attributes or their meaning change, and RUN_FORMAT
(pipeline.data.frozen.run_format) with it: a run cannot go on behind batches that it cannot read."""
_NAMES_BYTES = 64 << 10
_CHUNK_BYTES = 512
"""What zip and the attributes say about a chunk."""

PER_TOKEN: dict[str, str] = {
    "tokens": "int32",
    "sample_offsets": "int64",
    "rollout_logprobs": "float32",
    "policy_version": "int32",
    "loss_mask": "bool",
}
"""Arrays whose length is counted in tokens (or is one longer than the samples), with their dtypes."""

PER_SAMPLE: dict[str, str] = {
    "prompt_lengths": "int32",
    "group": "int64",
    "problem": "int64",
    "reward": "float32",
    "finish": "uint8",
    "truncated": "bool",
    "engine": "uint16",
    "queued_s": "float32",
    "generated_s": "float32",
}
"""Arrays [n], with their dtypes. `reward_parts` is stored beside them as float32 [parts, n]."""

KEPT = ("kept_offsets", "kept_tokens")
"""Optional arrays: the offsets and token ids of `Batch.kept`, int64 [responses + 1] and int32 [kept].
The attribute `optional_arrays` names those that a file has."""
EXPERTS = ("routed_experts", "routed_experts_known")
"""Optional too: `Batch.experts`, uint8 or uint16 [total, MoE layers, experts a token] and bool [total]."""
TEACHER_LOGPROBS = "teacher_logprobs"
"""Optional as well: float32 [responses]."""
OPTIONAL = (*KEPT, *EXPERTS, TEACHER_LOGPROBS, *PASSED_OVER)


def attributes_of(batch: Batch) -> dict[str, Any]:
    """What is stored as JSON beside the arrays."""
    return {
        "schema_version": SCHEMA_VERSION,
        "index": batch.index,
        "recipe_sha256": batch.recipe_sha256,
        "contract": asdict(batch.contract),
        "dropped": [asdict(dropped) for dropped in batch.dropped if not dropped.is_passed_over],
        "next_group": batch.next_group,
        "open_groups": _ranges(batch.open_groups),
        "reward_part_names": sorted(batch.reward_parts),
        "optional_arrays": sorted(_optional_arrays(batch)),
        **({"repeated": batch.repeated} if batch.repeated else {}),
    } | ({"sources": {name: [of.start, of.stop] for name, of in batch.sources.items()}} if batch.sources else {})


def _optional_arrays(batch: Batch) -> dict[str, NDArray[Any]]:
    found: dict[str, NDArray[Any]] = {}
    if batch.kept is not None:
        found |= zip(KEPT, (batch.kept.offsets, batch.kept.tokens), strict=True)
    if batch.experts is not None:
        found |= zip(EXPERTS, (batch.experts.ids, batch.experts.known), strict=True)
    if batch.teacher_logprobs is not None:
        found[TEACHER_LOGPROBS] = batch.teacher_logprobs
    return found | arrays_of_passed_over(batch.dropped)


def _ranges(numbers: Sequence[int]) -> list[list[int]]:
    """Ascending numbers as [start, stop) pairs: a long stage has tens of thousands of groups under way."""
    ranges: list[list[int]] = []
    for number in numbers:
        if ranges and ranges[-1][1] == number:
            ranges[-1][1] += 1
        else:
            ranges.append([number, number + 1])
    return ranges


def arrays_of(batch: Batch) -> dict[str, NDArray[Any]]:
    """What is stored as arrays, by name."""
    arrays = {name: getattr(batch, name) for name in (*PER_TOKEN, *PER_SAMPLE)}
    if batch.reward_parts:
        arrays["reward_parts"] = np.stack([batch.reward_parts[name] for name in sorted(batch.reward_parts)])
    return arrays | _optional_arrays(batch)


def num_bytes(batch: Batch) -> int:
    """What the batch's file takes at most: its arrays as they are, and some for names and checksums."""
    arrays = arrays_of(batch).values()
    chunks = sum(-(-len(array) // chunk_rows(array.shape, array.dtype)) for array in arrays)
    return sum(array.nbytes for array in arrays) + _CHUNK_BYTES * chunks + _NAMES_BYTES


def array_names(attributes: Mapping[str, Any]) -> list[str]:
    """Which arrays a batch stored with these attributes must have. Raises ValueError for an unreadable schema."""
    version = attributes.get("schema_version", 0)
    if version != SCHEMA_VERSION:
        raise ValueError(
            f"schema version {version}, this program reads {SCHEMA_VERSION}: "
            "if the file is whole, read it with the program that wrote it"
        )
    parts = ["reward_parts"] * bool(attributes["reward_part_names"])
    return [*PER_TOKEN, *PER_SAMPLE, *parts, *attributes["optional_arrays"]]


def check_sizes(shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Before the arrays of these shapes are read. Raises ValueError unless the records of experts, by far the largest,
    are about the tokens that there are."""
    total = shapes["tokens"]
    for name, axes in zip(EXPERTS, (3, 1), strict=True):
        shape = shapes.get(name)
        if shape is not None and (shape[:1] != total or len(shape) != axes):
            raise ValueError(f"{name} is {shape}, expected {axes} axes, the first of them the {total[0]} tokens")


def batch_from(attributes: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]], share: Share | None = None) -> Batch:
    """The inverse of storing; `arrays` are those of a batch with this `share`. Raises ValueError, KeyError or TypeError
    when something is missing or of another kind."""
    names = attributes["reward_part_names"]
    parts = arrays["reward_parts"] if names else np.empty((0, 0), np.float32)
    if len(parts) != len(names):
        raise ValueError(f"reward_parts has {len(parts)} rows, expected one for each of {names}")
    optional = attributes["optional_arrays"]
    if unknown := set(optional) - {*OPTIONAL}:
        raise ValueError(f"optional_arrays names {sorted(unknown)}, known are {list(OPTIONAL)}")
    fields: dict[str, Any] = {n: array for n, array in arrays.items() if n not in ("reward_parts", *optional)}
    dropped = [DroppedGroup(**drop) for drop in attributes["dropped"]]
    if PASSED_OVER[0] in optional:
        dropped = all_dropped(dropped, *(arrays[name] for name in PASSED_OVER))
    return Batch(
        index=attributes["index"],
        contract=LogprobContract(**attributes["contract"]),
        dropped=tuple(dropped),
        next_group=attributes["next_group"],
        open_groups=tuple(group for start, stop in attributes["open_groups"] for group in range(start, stop)),
        recipe_sha256=attributes["recipe_sha256"],
        reward_parts=dict(zip(names, parts, strict=True)),
        kept=KeptSets(offsets=arrays[KEPT[0]], tokens=arrays[KEPT[1]]) if KEPT[0] in optional else None,
        experts=RoutedExperts(ids=arrays[EXPERTS[0]], known=arrays[EXPERTS[1]]) if EXPERTS[0] in optional else None,
        teacher_logprobs=arrays[TEACHER_LOGPROBS] if TEACHER_LOGPROBS in optional else None,
        repeated=attributes.get("repeated", 0),
        sources={name: range(*ends) for name, ends in attributes.get("sources", {}).items()},
        share=share,
        **fields,
    )


def with_digests(attributes: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]]) -> dict[str, Any]:
    """`attributes` as they are stored beside `arrays`: with what each array is, the digests of its chunks
    (pipeline.data.arrays.chunks), and a digest of all that."""
    described = {
        name: dict(dtype=array.dtype.name, shape=list(array.shape), sha256=chunk_digests(array))
        for name, array in arrays.items()
    }
    whole = {**attributes, "arrays": described}
    return {**whole, "content_sha256": attributes_sha256(whole)}


def attributes_sha256(attributes: Mapping[str, Any]) -> str:
    """Digest of the attributes, those of chunks among them, and so of the content."""
    return hashlib.sha256(json.dumps(attributes, sort_keys=True).encode()).hexdigest()


def check_batch(batch: Batch, *, written: bool = True) -> None:
    """Raises ValueError, naming the array, unless all arrays have their dtype and agree with one another. A batch that
    is read, not `written`, need not be searched again for what its digest would show. Of tokens that are not held
    nothing is known."""
    for name, dtype in (PER_TOKEN | PER_SAMPLE).items():
        array = getattr(batch, name)
        if array.dtype != np.dtype(dtype) or array.ndim != 1:
            raise ValueError(f"{name} is {array.dtype.name} with {array.ndim} axes, expected {dtype} with 1")
    samples = batch.num_samples
    for name in PER_SAMPLE:
        if len(getattr(batch, name)) != samples:
            raise ValueError(f"{name} has {len(getattr(batch, name))} entries, expected {samples}, one a sample")
    for name, part in batch.reward_parts.items():
        if part.dtype != np.float32 or part.shape != (samples,):
            raise ValueError(f"reward part {name} is {part.dtype.name}{part.shape}, expected float32 ({samples},)")
    _check_offsets(batch)
    _check_groups(batch)
    _check_optional(batch, written=written)


def _check_optional(batch: Batch, *, written: bool) -> None:
    if (batch.kept is not None) != batch.contract.kept_set:
        raise ValueError(
            f"the contract says kept_set {batch.contract.kept_set}, but the batch has "
            f"{'none' if batch.kept is None else 'kept sets'}"
        )
    if batch.kept is not None:
        batch.kept.check(batch.response_tokens, batch.loss_mask[np.repeat(batch.held, batch.response_lengths)])
    if batch.experts is not None:
        batch.experts.check(len(batch.tokens), distinct=written)
    taught = batch.teacher_logprobs
    if taught is not None and (taught.dtype != np.float32 or taught.ndim != 1):
        raise ValueError(f"{TEACHER_LOGPROBS} is {taught.dtype.name} with {taught.ndim} axes, expected float32 with 1")


def _check_offsets(batch: Batch) -> None:
    offsets, samples = batch.sample_offsets, batch.num_samples
    if len(offsets) != samples + 1:
        raise ValueError(f"sample_offsets has {len(offsets)} entries, expected {samples + 1}")
    held, rises = int(batch.lengths[batch.held_samples].sum()), not np.any(np.diff(offsets) < 0)
    if offsets[0] != 0 or held != len(batch.tokens) or not rises:
        raise ValueError(f"sample_offsets does not rise from 0 to the {len(batch.tokens)} tokens")
    if np.any(batch.prompt_lengths < 0) or np.any(batch.response_lengths < 0):
        raise ValueError("a prompt is longer than its sample")
    responses = int(batch.response_offsets[-1])
    for name in batch.numbers:
        if len(getattr(batch, name)) != responses:
            raise ValueError(f"{name} has {len(getattr(batch, name))} entries, expected {responses} response tokens")
    if np.any(batch.tokens < 0):
        raise ValueError("a token id is negative")
    if np.any(batch.rollout_logprobs[~batch.loss_mask] != 0.0):
        raise ValueError("a token outside loss_mask has a log-probability, expected 0.0: no engine sampled it")


def _check_groups(batch: Batch) -> None:
    if np.any(batch.finish >= len(FINISH_REASONS)):
        raise ValueError(f"finish holds {int(batch.finish.max())}, expected an index into {FINISH_REASONS}")
    starts = np.flatnonzero(np.diff(batch.group)) + 1
    runs = batch.group[np.concatenate([[0], starts])] if batch.num_samples else batch.group
    if len(np.unique(runs)) != len(runs):
        raise ValueError("samples of a group are not adjacent")
    own = {*runs.tolist(), *(dropped.group for dropped in batch.dropped)}
    highest = max([*own, *batch.open_groups], default=-1)
    if highest >= batch.next_group:
        raise ValueError(f"group {highest} is not below next_group {batch.next_group}")
    if list(batch.open_groups) != sorted(set(batch.open_groups) - own):
        raise ValueError(f"open_groups {batch.open_groups} are not ascending, or hold a group of this very batch")

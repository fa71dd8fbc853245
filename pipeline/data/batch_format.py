"""Convert a batch to the arrays and attributes of its file, and back: whole, or with the tokens of one rank's samples.

    attributes ──one digest──▶ dtype, shape and chunk digests of every array
    arrays counted in samples ──whole──▶ the samples of each rank ──▶ the chunks of its tokens

`pipeline.data.store` names, commits and finds the files; `pipeline.data.zarr_zip` writes and reads their bytes.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from pipeline.data.batch import (
    FINISH_REASONS,
    PASSED_OVER,
    PER_RESPONSE_TOKEN,
    Batch,
    DroppedGroup,
    Episodes,
    KeptSets,
    LogprobContract,
    Share,
    StopReason,
    TokenKind,
    offsets_of,
    turns_of,
)
from pipeline.data.routed_experts import RoutedExperts
from pipeline.data.zarr_zip import ZarrFile, chunk_digests, chunk_rows
from precision.settings import problem_of
from precision.text import one_line

SCHEMA_VERSION = 7
"""The only version that is read. Raise it when arrays, attributes or their meaning change, together with RUN_FORMAT
(pipeline.data.run_recipes), since a run cannot resume behind batches that it cannot read."""
PER_TOKEN: dict[str, str] = {
    "tokens": "int32",
    "sample_offsets": "int64",
    "rollout_logprobs": "float32",
    "policy_version": "int32",
    "loss_mask": "bool",
}
"""Arrays counted in tokens (or with one entry more than samples), with their dtypes."""
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
"""Optional: `Batch.kept`, int64 [responses + 1] and int32 [kept]. `optional_arrays` names a file's optional arrays."""
EXPERTS = ("routed_experts", "routed_experts_known")
"""Optional: `Batch.experts`, uint8 or uint16 [total, MoE layers, experts a token] and bool [total]."""
TEACHER_LOGPROBS = "teacher_logprobs"
"""Optional: float32 [responses]."""
EPISODES: dict[str, str] = {
    "number": "int64",
    "branch_of": "int32",
    "branched_at": "int32",
    "turns": "int32",
    "stopped": "uint8",
    "tool_calls": "int32",
    "tool_s": "float32",
}
"""Optional: the fields [n] of `Batch.episodes`, with their dtypes, stored as episode_NAME. They and the two arrays
below are in files of batches with episodes of several turns alone."""
TOKEN_KIND = "token_kind"
"""Optional: uint8 [responses]."""
TURN_REWARDS = "episode_turn_rewards"
"""Optional: float32 [turns]."""
_OF_EPISODES = (*(f"episode_{name}" for name in EPISODES), TURN_REWARDS)
OPTIONAL = (*KEPT, *EXPERTS, TEACHER_LOGPROBS, *PASSED_OVER, *_OF_EPISODES, TOKEN_KIND)
MOST_OPEN = 1 << 22
"""The most groups in progress: a stage of a million prompts has fewer."""
_NAMES_BYTES = 64 << 10
_CHUNK_BYTES = 512
"""Bytes of a chunk's entries in zip and attributes."""
Choose = Callable[[Batch], Share]
"""Chooses a rank's samples, from a batch without tokens."""
_OF_RESPONSES = (*PER_RESPONSE_TOKEN, TEACHER_LOGPROBS, TOKEN_KIND)
_COUNTED_IN_TOKENS = (*PER_TOKEN, *KEPT, *EXPERTS, TEACHER_LOGPROBS, TOKEN_KIND)


def attributes_of(batch: Batch) -> dict[str, Any]:
    """Return the attributes that are stored as JSON."""
    open_groups = list[list[int]]()
    for group in batch.open_groups:  # as [start, stop): a long stage has tens of thousands of groups in progress
        if open_groups and open_groups[-1][1] == group:
            open_groups[-1][1] += 1
        else:
            open_groups.append([group, group + 1])
    return {
        "schema_version": SCHEMA_VERSION,
        "index": batch.index,
        "recipe_sha256": batch.recipe_sha256,
        "contract": asdict(batch.contract),
        "dropped": [asdict(dropped) for dropped in batch.dropped if not dropped.is_passed_over],
        "next_group": batch.next_group,
        "open_groups": open_groups,
        "reward_part_names": sorted(batch.reward_parts),
        "optional_arrays": sorted(_optional_arrays(batch)),
        **({"repeated": batch.repeated} if batch.repeated else {}),
        **({"bias": dict(batch.bias)} if batch.bias else {}),
    } | ({"sources": {name: [of.start, of.stop] for name, of in batch.sources.items()}} if batch.sources else {})


def _optional_arrays(batch: Batch) -> dict[str, NDArray[Any]]:
    found: dict[str, NDArray[Any]] = {}
    if batch.kept is not None:
        found |= zip(KEPT, (batch.kept.offsets, batch.kept.tokens), strict=True)
    if batch.experts is not None:
        found |= zip(EXPERTS, (batch.experts.ids, batch.experts.known), strict=True)
    for name in (TEACHER_LOGPROBS, TOKEN_KIND):
        if (values := getattr(batch, name)) is not None:
            found[name] = values
    if batch.episodes is not None:
        found |= {f"episode_{name}": getattr(batch.episodes, name) for name in EPISODES}
        if batch.episodes.turn_rewards is not None:
            found[TURN_REWARDS] = batch.episodes.turn_rewards
    if passed := [(drop.group, drop.problem) for drop in batch.dropped if drop.is_passed_over]:
        found |= zip(PASSED_OVER, np.array(passed, np.int64).T.copy(), strict=True)
    return found


def arrays_of(batch: Batch) -> dict[str, NDArray[Any]]:
    """Return the arrays that are stored, by name."""
    arrays = {name: getattr(batch, name) for name in (*PER_TOKEN, *PER_SAMPLE)}
    if batch.reward_parts:
        arrays["reward_parts"] = np.stack([batch.reward_parts[name] for name in sorted(batch.reward_parts)])
    return arrays | _optional_arrays(batch)


def num_bytes(batch: Batch) -> int:
    """Return an upper bound of the file's size: uncompressed arrays, names and checksums."""
    arrays = arrays_of(batch).values()
    chunks = sum(-(-len(array) // chunk_rows(array.shape, array.dtype)) for array in arrays)
    return sum(array.nbytes for array in arrays) + _CHUNK_BYTES * chunks + _NAMES_BYTES


def batch_from(attributes: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]], share: Share | None = None) -> Batch:
    """Build a batch from attributes and a `share`'s arrays. Raises ValueError, KeyError or TypeError for damage."""
    names = attributes["reward_part_names"]
    parts = arrays["reward_parts"] if names else np.empty((0, 0), np.float32)
    if len(parts) != len(names):
        raise ValueError(f"reward_parts has {len(parts)} rows, expected one for each of {names}")
    optional = attributes["optional_arrays"]
    if unknown := set(optional) - {*OPTIONAL}:
        raise ValueError(f"optional_arrays names {sorted(unknown)}, known are {list(OPTIONAL)}")
    fields: dict[str, Any] = dict(arrays)
    for name in ("reward_parts", *optional):
        fields.pop(name, None)
    dropped = [DroppedGroup(**drop) for drop in attributes["dropped"]]
    if PASSED_OVER[0] in optional:
        groups, problems = (arrays[name] for name in PASSED_OVER)
        if not groups.dtype == problems.dtype == np.int64 or groups.ndim != 1 or groups.shape != problems.shape:
            raise ValueError(f"{PASSED_OVER} are {groups.dtype}{groups.shape} and {problems.dtype}{problems.shape}")
        dropped += [DroppedGroup.passed_over(*each) for each in zip(groups.tolist(), problems.tolist(), strict=True)]
        dropped.sort(key=lambda drop: drop.group)
    open_groups = list[int]()
    for start, stop in attributes["open_groups"]:
        open_groups += range(start, stop)
    return Batch(
        index=attributes["index"],
        contract=LogprobContract(**attributes["contract"]),
        dropped=tuple(dropped),
        next_group=attributes["next_group"],
        open_groups=tuple(open_groups),
        recipe_sha256=attributes["recipe_sha256"],
        reward_parts=dict(zip(names, parts, strict=True)),
        kept=KeptSets(offsets=arrays[KEPT[0]], tokens=arrays[KEPT[1]]) if KEPT[0] in optional else None,
        experts=RoutedExperts(ids=arrays[EXPERTS[0]], known=arrays[EXPERTS[1]]) if EXPERTS[0] in optional else None,
        teacher_logprobs=arrays[TEACHER_LOGPROBS] if TEACHER_LOGPROBS in optional else None,
        token_kind=arrays[TOKEN_KIND] if TOKEN_KIND in optional else None,
        episodes=None
        if "episode_number" not in optional
        else Episodes(
            **{name: arrays[f"episode_{name}"] for name in EPISODES},
            turn_rewards=arrays[TURN_REWARDS] if TURN_REWARDS in optional else None,
        ),
        repeated=attributes.get("repeated", 0),
        bias=attributes.get("bias", {}),
        sources={name: range(*ends) for name, ends in attributes.get("sources", {}).items()},
        share=share,
        **fields,
    )


def with_digests(attributes: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]]) -> dict[str, Any]:
    """Return the stored `attributes`: with each array's dtype, shape and chunk digests, and a digest of all of that."""
    described = {
        name: dict(dtype=array.dtype.name, shape=list(array.shape), sha256=chunk_digests(array))
        for name, array in arrays.items()
    }
    whole = {**attributes, "arrays": described}
    return {**whole, "content_sha256": attributes_sha256(whole)}


def attributes_sha256(attributes: Mapping[str, Any]) -> str:
    """Return the digest of the attributes and, through their chunk digests, of the content."""
    return hashlib.sha256(json.dumps(attributes, sort_keys=True).encode()).hexdigest()


def check_batch(batch: Batch, *, written: bool = True) -> None:
    """Raise ValueError, naming the array, unless all arrays have their dtype and agree. For a batch that was read, not
    `written`, checks that its digest covers are skipped. Tokens that are not held are not checked."""
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
    offsets = batch.sample_offsets
    held, rises = int(batch.lengths[batch.held].sum()), not np.any(np.diff(offsets) < 0)
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
    if np.any(batch.finish >= len(FINISH_REASONS)):
        raise ValueError(f"finish holds {int(batch.finish.max())}, expected an index into {FINISH_REASONS}")
    starts = np.flatnonzero(np.diff(batch.group)) + 1
    runs = batch.group[np.concatenate([[0], starts])] if batch.num_samples else batch.group
    if len(np.unique(runs)) != len(runs):
        raise ValueError("samples of a group are not adjacent")
    own = set(runs.tolist())
    for dropped in batch.dropped:
        own.add(dropped.group)
    highest = max([*own, *batch.open_groups], default=-1)
    if highest >= batch.next_group:
        raise ValueError(f"group {highest} is not below next_group {batch.next_group}")
    if list(batch.open_groups) != sorted(set(batch.open_groups) - own):
        raise ValueError(f"open_groups {batch.open_groups} are not ascending, or hold a group of this very batch")
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
    if (batch.episodes is None) != (batch.token_kind is None):
        raise ValueError(f"{TOKEN_KIND} and the arrays of episodes belong together, and only one is there")
    if batch.episodes is not None and batch.token_kind is not None:
        check_episodes(batch, batch.episodes, batch.token_kind)


def check_episodes(batch: Batch, episodes: Episodes, kinds: NDArray[np.uint8]) -> None:
    """Raise ValueError, naming the row, unless the rows of each episode belong together, repeat what they share, and
    train each sampled turn once. Of tokens, those of the held rows are checked."""
    n = batch.num_samples
    for name, dtype in EPISODES.items():
        array = getattr(episodes, name)
        if array.dtype != np.dtype(dtype) or array.shape != (n,):
            raise ValueError(f"episode_{name} is {array.dtype.name}{array.shape}, expected {dtype} ({n},)")
    if kinds.dtype != np.uint8 or kinds.ndim != 1:
        raise ValueError(f"{TOKEN_KIND} is {kinds.dtype.name} with {kinds.ndim} axes, expected uint8 with 1")

    def refuse(bad: NDArray[np.bool_], what: str) -> None:
        if bad.any():
            raise ValueError(f"row {int(np.argmax(bad))} {what}")

    refuse(episodes.number != batch.episode, "is not beside the other rows of its episode, or episodes do not ascend")
    first, rows = batch.first_rows[batch.episode], np.arange(n)
    alike = {name: getattr(batch, name) for name in ("group", "problem", "reward", "truncated")}
    alike |= {name: getattr(episodes, name) for name in ("stopped", "tool_calls", "tool_s")}
    for name, values in (alike | dict(batch.reward_parts)).items():
        differs = (values != values[first]) & ~((values != values) & (values[first] != values[first]))  # NaN is alike
        refuse(differs, f"has another {name} than the first row of its episode")
    refuse(episodes.stopped >= len(StopReason), f"stopped for a reason that is not below {len(StopReason)}")
    refuse(episodes.tool_calls < 0, "has a negative number of tool calls")
    refuse(~(np.isfinite(episodes.tool_s) & (episodes.tool_s >= 0)), "has tool_s that are no seconds from 0 on")
    refuse(episodes.turns < 1, "has no sampled turn, so there is nothing to train in it")
    parent, shared = episodes.branch_of, episodes.branched_at
    refuse((parent < -1) | (parent >= rows), "branched from a row that is not before it")
    refuse((parent >= 0) & (parent < first), "branched from a row of another episode")
    refuse((parent < 0) & (shared != 0), "repeats tokens of a row without being a branch of it")
    refuse(
        (shared < 0) | (shared > batch.prompt_lengths) | (shared > np.where(parent < 0, shared, batch.lengths[parent])),
        "repeats more tokens than its prompt or the row that it branched from has",
    )
    if episodes.turn_rewards is not None:
        rewards, turns = episodes.turn_rewards, int(episodes.turns.sum())
        if rewards.dtype != np.float32 or rewards.shape != (turns,) or np.isinf(rewards).any():
            raise ValueError(
                f"{TURN_REWARDS} is {rewards.dtype.name}{rewards.shape}, expected finite float32 ({turns},)"
            )
    # Tokens, of the held rows.
    refuse(
        batch.held & _any_of_row(batch, kinds >= len(TokenKind)), f"has a token kind that is not below {len(TokenKind)}"
    )
    ends = np.zeros(len(kinds), np.bool_)
    full = batch.response_lengths > 0
    ends[batch.response_offsets[:-1][full]] = ends[batch.response_offsets[1:][full] - 1] = True
    sampled = kinds == TokenKind.SAMPLED
    refuse(batch.held & _any_of_row(batch, ends & ~sampled), "begins or ends its response with a token not sampled")
    found = np.bincount(turns_of(kinds, batch.response_offsets)[:, 0], minlength=n)
    refuse(batch.held & (found != episodes.turns), "has another number of turns than its token kinds tell")
    learned = _any_of_row(batch, batch.loss_mask)
    if batch.share is None:
        learned = (np.bincount(batch.episode, learned, minlength=batch.num_episodes) > 0)[batch.episode]
    refuse(
        batch.held & learned & _any_of_row(batch, batch.loss_mask != sampled),
        "has a loss_mask that is not that of its sampled tokens, nor empty in its whole episode",
    )
    tokens = batch.rows()
    for row in np.flatnonzero((parent >= 0) & batch.held & batch.held[parent]).tolist():
        count = int(shared[row])
        if not np.array_equal(tokens[row][:count], tokens[parent[row]][:count]):
            raise ValueError(f"row {row} does not repeat the first {count} tokens of row {int(parent[row])}")


def _any_of_row(batch: Batch, tokens: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Return [n] whether any response token of each row is in `tokens` [responses]."""
    counts = np.concatenate([[0], np.cumsum(tokens)])[batch.response_offsets]
    return np.asarray(np.diff(counts) > 0)


_Number = Annotated[int, Field(ge=0, lt=1 << 53)]
_Text = Annotated[str, Field(max_length=1000)]
_Range = Annotated[list[_Number], Field(min_length=2, max_length=2)]


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)


class _Contract(_Strict):
    temperature: float
    top_p: float
    top_k: int
    tokenizer_sha256: _Text
    kept_set: bool


class _Dropped(_Strict):
    group: _Number
    reason: _Text
    kind: _Text
    problem: int
    samples: _Number
    solved: _Number


class _Array(_Strict):
    dtype: _Text
    shape: list[_Number]
    sha256: list[Annotated[str, Field(pattern="^[0-9a-f]{64}$")]]


class _Attributes(_Strict):
    model_config = ConfigDict(extra="ignore")

    index: _Number
    recipe_sha256: _Text
    contract: _Contract
    dropped: list[_Dropped]
    next_group: _Number
    open_groups: list[_Range]
    reward_part_names: list[_Text]
    optional_arrays: list[_Text]
    sources: dict[Annotated[str, Field(pattern="^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$")], _Range] = {}
    repeated: _Number = 0
    bias: dict[_Text, float] = {}
    arrays: dict[_Text, _Array]


def check_attributes(attributes: Mapping[str, Any]) -> None:
    """Raise ValueError, on one line, for another schema version and for malformed attributes."""
    version = attributes.get("schema_version", 0)
    if version != SCHEMA_VERSION:
        raise ValueError(
            f"schema version {version}, this program reads {SCHEMA_VERSION}: "
            "if the file is whole, read it with the program that wrote it"
        )
    try:
        found = _Attributes.model_validate_json(json.dumps(dict(attributes)))
    except ValidationError as error:
        raise ValueError(f"its attributes are damaged ({problem_of(error)})") from None
    except (ValueError, TypeError, RecursionError) as error:
        raise ValueError(f"its attributes are damaged ({one_line(error, 200)})") from None
    count, are_ranges = 0, True
    for start, stop in found.open_groups:
        count += stop - start
        are_ranges &= start < stop
    if count > MOST_OPEN or not are_ranges:
        raise ValueError(f"open_groups names {count} groups, expected ascending ranges of {MOST_OPEN} at most in all")


def read_batch(file: ZarrFile) -> Batch:
    """Read a whole batch. Raises any error that damage causes in the checks."""
    attributes, digests = read_attributes(file)
    batch = batch_from(attributes, {name: file.rows(name, digests=digests[name]) for name in digests})
    check_batch(batch, written=False)
    return batch


def read_share(file: ZarrFile, choose: Choose) -> Batch:
    """Read a batch with the tokens of the chosen samples only (Batch.share). Raises as `read_batch`."""
    attributes, digests = read_attributes(file)
    names = [*digests]
    arrays = {name: file.rows(name, digests=digests[name]) for name in names if name not in _COUNTED_IN_TOKENS}
    offsets = arrays["sample_offsets"] = file.rows("sample_offsets", digests=digests["sample_offsets"])
    lengths, prompts = np.diff(offsets), arrays["prompt_lengths"]
    if lengths.shape != prompts.shape or np.any(prompts < 0) or np.any(lengths < prompts):
        raise ValueError(f"a prompt is longer than its sample, or {len(lengths)} samples have {len(prompts)} prompts")
    responses = offsets_of(lengths - prompts)
    # The file must have every sample, whoever reads it.
    wanted = dict.fromkeys(("tokens", *EXPERTS), int(offsets[-1]))
    wanted |= dict.fromkeys(_OF_RESPONSES, int(responses[-1])) | {KEPT[0]: int(responses[-1]) + 1}
    for name in names:
        rows = file.arrays[name].shape[0]
        if wanted.get(name, rows) != rows:
            raise ValueError(f"{name} has {rows} entries, expected {wanted[name]}")

    def read(held: NDArray[np.bool_]) -> dict[str, NDArray[Any]]:
        """Return the arrays counted in tokens, for a batch that holds the samples `held` [n]."""
        edges = np.flatnonzero(np.diff(np.concatenate([[False], held, [False]]).astype(np.int8))).reshape(-1, 2)
        of_tokens, of_responses = ([(int(at[i]), int(at[j])) for i, j in edges] for at in (offsets, responses))
        found = {name: file.rows(name, of_tokens, digests[name]) for name in names if name in ("tokens", *EXPERTS)}
        own = np.repeat(held, np.diff(responses))
        for name in [name for name in _OF_RESPONSES if name in names]:
            found[name] = np.zeros(len(own), file.arrays[name].dtype)
            found[name][own] = file.rows(name, of_responses, digests[name])
        if KEPT[0] in names:
            sets = [file.rows(KEPT[0], [(start, stop + 1)], digests[KEPT[0]]) for start, stop in of_responses]
            inside = [(int(each[0]), int(each[-1])) for each in sets]
            found[KEPT[0]] = offsets_of(np.concatenate([np.zeros(0, np.int64), *map(np.diff, sets)]))
            found[KEPT[1]] = file.rows(KEPT[1], inside, digests[KEPT[1]])
        return found

    nothing = Share(ranks=np.zeros(len(prompts), np.int64), rank=-1)
    share = choose(batch_from(attributes, arrays | read(nothing.held), nothing))
    batch = batch_from(attributes, arrays | read(share.held), share)
    check_batch(batch, written=False)
    return batch


def read_attributes(file: ZarrFile) -> tuple[dict[str, Any], dict[str, list[str]]]:
    """Return the attributes, and each array's chunk digests. Raises ValueError for changed metadata."""
    attributes = dict(file.attributes)
    check_attributes(attributes)
    parts = ["reward_parts"] * bool(attributes["reward_part_names"])
    names = [*PER_TOKEN, *PER_SAMPLE, *parts, *attributes["optional_arrays"]]
    for name in names:
        if name not in file.arrays:
            raise ValueError(f"array {name} is missing")
    expected = attributes.pop("content_sha256", None)
    if attributes_sha256(attributes) != expected:
        raise ValueError("content digest differs: the attributes were changed")
    digests: dict[str, list[str]] = {}
    described = attributes.pop("arrays")
    for name in names:
        layout, said = file.arrays[name], described[name]
        chunks = 0 if 0 in layout.shape else -(-layout.shape[0] // layout.chunk_rows)
        if (layout.dtype.name, list(layout.shape), chunks) != (said["dtype"], said["shape"], len(said["sha256"])):
            raise ValueError(f"content digest differs: {name} is {layout.dtype.name}{layout.shape}")
        digests[name] = said["sha256"]
    return attributes, digests

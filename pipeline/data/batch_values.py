"""Check the values of batches by one set of rules: for an engine's answer, a verdict, a commit and an audit.

    an engine's answer ──▶ response_faults ──▶ refused: the engine's fault, retried on another
    a verdict          ──▶ verdict_fault   ──▶ refused: counts as a failed verifier
    a batch            ──▶ batch_faults, at the commit, at each read, in `verify history`

Checks apply to the stored numbers, after their cast to float32 and int32: 1e39 is finite as a double and infinite as a
float32.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from pipeline.data.batch import FINISH_REASONS, OWN_PARTS, Batch, KeptSets, turns_of
from precision.text import quoted

HIGHEST_LOGPROB = 1e-5
"""Engines divide by a rounded sum, some with a division of two units in the last place, which can give a probability of
1 + 1e-6. 84 units of float32 cover every engine, and mean nothing to a learner."""
LOWEST_LOGPROB = -128.0
"""Engines draw from float32 probabilities: below 2^-149 (a logarithm of -103.3) a probability is 0 and never drawn. The
clamped logarithm of 0, -3.4e38, is finite, but its ratio becomes infinite."""
MOST_TOKENS = 1 << 31
MOST_PARTS = 64
"""The most reward parts of a sample or batch: the batch stores a column for each name."""
PART_NAME = re.compile(r"\w[\w.:/+=@ -]{0,63}")
"""Names are printed to terminals and become columns of reports. Letters are those of any language."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """The limits of recipe and model; None is unknown and not checked."""

    vocab_size: int | None = None
    """Rows of the embedding: an engine may sample an id that the tokenizer lacks."""
    max_response_tokens: int | None = None
    """Of one answer of an engine: a response of one turn, or a turn of an episode."""
    num_experts: int | None = None


UNKNOWN = Limits()


@dataclass(frozen=True)
class Fault:
    """An impossible value. `sample` counts from 0."""

    sample: int
    what: str

    def __str__(self) -> str:
        return f"sample {self.sample}: {self.what}"


@dataclass(frozen=True, kw_only=True, eq=False)
class Responses:
    """Response tokens of n samples, flat, as in a batch."""

    offsets: NDArray[np.int64]
    """[n + 1] start of each response in the token arrays."""
    tokens: NDArray[np.integer]
    """[responses] ids."""
    logprobs: NDArray[np.float32]
    """[responses] after the cast."""
    versions: NDArray[np.integer]
    """[responses]"""
    sampled: NDArray[np.bool_]
    """[responses] False where no engine sampled the token, whose log-probability is 0."""
    may_be_empty: NDArray[np.bool_]
    """[n] True for samples that were aborted before their first token."""
    queued_s: NDArray[np.float32]
    """[n]"""
    generated_s: NDArray[np.float32]
    """[n]"""
    kept: KeptSets | None = None


def response_faults(responses: Responses, limits: Limits) -> Iterator[Fault]:
    """Yield the first fault of each kind. Array lengths must agree."""
    lengths = np.diff(responses.offsets)
    yield from _of_samples(
        (lengths == 0) & ~responses.may_be_empty,
        "the response is empty, expected one token at least: an engine samples an end, too",
    )
    most = limits.max_response_tokens
    if most is not None:
        for sample in np.flatnonzero(lengths > most)[:1].tolist():
            yield Fault(sample, f"the response has {lengths[sample]} tokens, at most {most} were asked for")
    tokens, logprobs, versions = responses.tokens, responses.logprobs, responses.versions
    vocab_size = MOST_TOKENS if limits.vocab_size is None else limits.vocab_size

    def first(bad: NDArray[np.bool_], what: Callable[[int], str]) -> Iterator[Fault]:
        for place in np.flatnonzero(bad)[:1].tolist():
            sample = int(np.searchsorted(responses.offsets, place, side="right")) - 1
            yield Fault(sample, f"response token {place - int(responses.offsets[sample])}: {what(place)}")

    yield from first((tokens < 0) | (tokens >= vocab_size), lambda i: f"id {tokens[i]}, expected 0 to {vocab_size - 1}")
    yield from first(
        (versions < 0) | (versions >= MOST_TOKENS), lambda i: f"policy version {versions[i]}, expected 0 or later"
    )
    in_range = np.isfinite(logprobs) & (logprobs >= LOWEST_LOGPROB) & (logprobs <= HIGHEST_LOGPROB)
    yield from first(
        responses.sampled & ~in_range,
        lambda i: f"log-probability {logprobs[i]:g}, expected {LOWEST_LOGPROB:g} to 0",
    )
    yield from first(
        ~responses.sampled & (logprobs != 0.0),
        lambda i: f"log-probability {logprobs[i]:g} of a token that no engine sampled, expected 0",
    )
    if responses.kept is not None:
        kept = responses.kept
        bad = (kept.tokens < 0) | (kept.tokens >= vocab_size)
        if bad.any():
            owner = np.zeros(len(tokens), np.bool_)
            owner[np.searchsorted(kept.offsets, np.flatnonzero(bad)[:1], side="right") - 1] = True
            yield from first(owner, lambda _: f"its kept set holds an id outside 0 to {vocab_size - 1}")
    for name, seconds in (("queued_s", responses.queued_s), ("generated_s", responses.generated_s)):
        for sample in np.flatnonzero(~(np.isfinite(seconds) & (seconds >= 0.0)))[:1].tolist():
            yield Fault(sample, f"{name} is {seconds[sample]:g}, expected seconds from 0 on")


def verdict_fault(reward: float, parts: Mapping[str, float]) -> str | None:
    """Return the fault of a verdict, or None."""
    if not is_finite_float32(reward):
        return f"the reward is {quoted(reward)}, expected a number that float32 can hold"
    if own := OWN_PARTS.intersection(parts):
        return f"a reward part is named {min(own)!r}, a name kept for samples that failed: choose another"
    return part_names_fault(parts) or next(
        (
            f"part {name} is {quoted(value)}, expected a number that float32 can hold"
            for name, value in parts.items()
            if not is_finite_float32(value)
        ),
        None,
    )


def part_names_fault(names: Mapping[str, object]) -> str | None:
    """Return why names of reward parts cannot be stored or shown, or None."""
    if len(names) > MOST_PARTS:
        return f"there are {len(names)} reward parts, expected at most {MOST_PARTS}: name them alike for all samples"
    for name in names:
        if not PART_NAME.fullmatch(name):
            return (
                f"a reward part is named {quoted(name)}, expected 1 to 64 letters, digits and "
                "._:/+=@- or blanks, a letter or digit first"
            )
    return None


def is_finite_float32(value: float) -> bool:
    """Return whether `value` is a number that float32 can hold."""
    return isinstance(value, int | float) and math.isfinite(as_float32([value])[0])


def as_float32(values: object) -> NDArray[np.float32]:
    """Cast to float32 as stored; numbers that float32 cannot hold become infinite, without a warning."""
    with np.errstate(over="ignore", invalid="ignore"):
        try:
            return np.asarray(values, np.float64).astype(np.float32)
        except OverflowError:  # an int that no double can hold
            return np.array([np.inf], np.float32)


_ABORT = FINISH_REASONS.index("abort")


def batch_faults(batch: Batch, limits: Limits = UNKNOWN) -> Iterator[Fault]:
    """Yield the first fault of each kind in a batch that passes `check_batch`; of a share, in the held samples."""
    if batch.share is not None:
        numbers = np.flatnonzero(batch.held)
        yield from (Fault(int(numbers[fault.sample]), fault.what) for fault in batch_faults(batch.alone(), limits))
        return
    responses = Responses(
        offsets=batch.response_offsets,
        tokens=batch.response_tokens,
        logprobs=batch.rollout_logprobs,
        versions=batch.policy_version,
        sampled=batch.loss_mask,
        may_be_empty=np.zeros(batch.num_samples, np.bool_),
        queued_s=batch.queued_s,
        generated_s=batch.generated_s,
        kept=batch.kept,
    )
    if batch.token_kind is None:
        yield from response_faults(responses, limits)
    else:
        yield from response_faults(responses, replace(limits, max_response_tokens=None))
        row, start, end = turns_of(batch.token_kind, batch.response_offsets).T
        most = limits.max_response_tokens
        for turn in np.flatnonzero(end - start > most)[:1].tolist() if most is not None else ():
            length = int(end[turn] - start[turn])
            yield Fault(int(row[turn]), f"a turn has {length} tokens, at most {most} were asked for")
    if (taught := batch.teacher_logprobs) is not None:
        possible = np.isfinite(taught) & (taught >= LOWEST_LOGPROB) & (taught <= HIGHEST_LOGPROB)
        bad = np.where(batch.loss_mask, ~possible, taught != 0.0)
        for place in np.flatnonzero(bad)[:1].tolist():
            sample = int(np.searchsorted(batch.response_offsets, place, side="right")) - 1
            yield Fault(
                sample, f"the teacher gave a token {taught[place]:g}, expected a log-probability, 0 if not sampled"
            )
    yield from _of_samples(batch.prompt_lengths < 1, "it has no prompt, expected one token at least")
    vocab_size = MOST_TOKENS if limits.vocab_size is None else limits.vocab_size
    for place in np.flatnonzero((batch.tokens < 0) | (batch.tokens >= vocab_size))[:1].tolist():
        sample = int(np.searchsorted(batch.sample_offsets, place, side="right")) - 1
        yield Fault(sample, f"token id {batch.tokens[place]}, expected 0 to {vocab_size - 1}")
    yield from _of_samples(batch.finish == _ABORT, "it was aborted, expected samples that ended")
    yield from _of_samples(~np.isfinite(batch.reward), "its reward is no finite number")
    if (names := part_names_fault(batch.reward_parts)) is not None:
        yield Fault(0, names)
    for name, values in batch.reward_parts.items():
        yield from _of_samples(np.isinf(values), f"its reward part {name} is infinite")  # NaN: it has no such part
    if batch.experts is not None and limits.num_experts is not None and batch.experts.ids.size:
        found = int(batch.experts.ids.max())
        if found >= limits.num_experts:
            place = int(np.argmax((batch.experts.ids >= limits.num_experts).any(axis=(1, 2))))
            sample = int(np.searchsorted(batch.sample_offsets, place, side="right")) - 1
            yield Fault(sample, f"a token went to expert {found}, expected 0 to {limits.num_experts - 1}")


def check_values(batch: Batch, limits: Limits = UNKNOWN) -> None:
    """Raise ValueError for the first fault, naming its sample."""
    for fault in islice(batch_faults(batch, limits), 1):
        raise ValueError(str(fault))


def _of_samples(bad: NDArray[np.bool_], what: str) -> Iterator[Fault]:
    for sample in np.flatnonzero(bad)[:1].tolist():
        yield Fault(sample, what)

"""Convert the bytes of an answer to completions and scores, refusing invalid samples with a reason.

    parts ──ElementCutter──▶ a sample, counted and measured ──pydantic──▶ Generated
          ──counts against the request, shapes──▶ arrays ──pipeline.data.batch_values──▶ a completion

Every size is checked before memory is allocated for it. An answer is read sample by sample as it arrives: memory holds
the arrays of the samples so far, and the bytes of one sample.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Generic, TypeVar, get_args

import numpy as np
from numpy.typing import NDArray
from pydantic import ValidationError

from pipeline.background import beside_loop
from pipeline.data.batch import Completion, FinishReason, KeptSets, Sampling
from pipeline.data.batch_values import HIGHEST_LOGPROB, Limits, Responses, as_float32, response_faults
from pipeline.data.routed_experts import RoutedExperts, decode_engine_rows, rows_still_true
from pipeline.errors import BadAnswerError
from precision.settings import problem_of
from precision.text import quoted
from rollout_sglang.protocol import GENERATED, Generated, MetaInfo, policy_version

SAMPLE_BYTES = 1 << 16
"""Limit of a sample's data beside its tokens: names, versions, a message."""
TOKEN_BYTES = 512
"""Limit for a token: its id twice (20), a log-probability (24) and its text. The longest text of known tokenizers has
128 characters, and JSON writes some of them as two bytes, rarely more. Honest answers have about 50 bytes."""
ID_BYTES = 12
"""An id in a kept set, with its comma."""
MOST_KEPT_IDS = 1 << 12
"""SGLang ends a request that keeps more ids for one token."""
SCORE_BYTES = 64
"""Limit for a scored token: log-probability, id, null."""
_REASONS: tuple[FinishReason, ...] = get_args(FinishReason)
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Asked:
    """A request's parameters, with which its answer must agree."""

    num_prompt: int
    num_samples: int
    sampling: Sampling
    keeps_kv: bool = False
    """Whether keys and values outlast an update of the weights, so that no token is prefilled again."""
    late_tokens: int = 0
    """Tokens before a change of weights that the server counts as the new version's."""

    sample_bytes: int = field(init=False)
    """More bytes than any valid sample has."""

    def __post_init__(self) -> None:
        sampling, tokens = self.sampling, self.sampling.max_new_tokens
        most = SAMPLE_BYTES + tokens * TOKEN_BYTES
        if sampling.kept_set:
            most += tokens * (MOST_KEPT_IDS * ID_BYTES + SCORE_BYTES)
        if (shape := sampling.experts) is not None:
            most += 6 * (self.num_prompt + tokens) * shape.num_layers * shape.per_token  # base64 of int32
        object.__setattr__(self, "sample_bytes", most)


class NoListError(ValueError):
    """Bytes that are not a JSON list of objects of the expected size."""


class SampleReader(Generic[T]):
    """A reader that converts each sample of an answer, in order, while the answer arrives. Methods raise BadAnswerError
    for an invalid answer, and errors of `make`."""

    def __init__(self, make: Callable[[int, Generated], T], *, expected: int, sample_bytes: int) -> None:
        """`make` takes each sample's number and the sample; `expected` samples of at most `sample_bytes` must come."""
        self._make = make
        self._expected = expected
        self._cutter = ElementCutter(most=expected, element_bytes=sample_bytes)
        self._made: list[T] = []

    def add(self, part: bytes) -> None:
        try:
            for sample in self._cutter.add(part):
                number = len(self._made)
                try:
                    parsed = GENERATED.validate_json(sample)
                except ValidationError as error:
                    raise BadAnswerError(
                        f"sample {number} is something else than SGLang's protocol ({problem_of(error)})"
                    ) from None
                self._made.append(self._make(number, parsed))
        except NoListError as error:
            raise BadAnswerError(f"it answered something else than SGLang's protocol: {error}") from None

    def end(self) -> list[T]:
        """Return the results of `make`, after the last bytes."""
        try:
            self._cutter.end()
        except NoListError as error:
            raise BadAnswerError(f"it answered something else than SGLang's protocol: {error}") from None
        if len(self._made) != self._expected:
            raise BadAnswerError(f"it answered {len(self._made)} samples, expected {self._expected}")
        return self._made


def completion_reader(asked: Asked, *, engine: int, waited_s: Callable[[], float]) -> SampleReader[Completion]:
    """Return a reader of the requested samples; `waited_s` returns how long the caller has waited so far. The reader's
    methods also raise EngineVersionError, for tokens of weights that are not ours."""
    return SampleReader(
        lambda number, sample: _completion(number, sample, asked, engine, waited_s()),
        expected=asked.num_samples,
        sample_bytes=asked.sample_bytes,
    )


def _completion(number: int, sample: Generated, asked: Asked, engine: int, elapsed_s: float) -> Completion:
    if (what := _shape_fault(sample, asked)) is not None:
        raise BadAnswerError(f"sample {number}: {what}")
    meta = sample.meta_info
    if meta.finish_reason.type == "abort" and asked.sampling.kept_set and meta.output_token_sampling_mask is None:
        # Retracted, then aborted while it waited: SGLang answers the tokens so far without kept sets.
        return replace(Completion.given((), ()), finish="abort", engine=engine, queued_s=elapsed_s)
    try:
        tokens = np.array(sample.output_ids, np.int64)
    except OverflowError:
        raise BadAnswerError(f"sample {number}: a token id does not fit 64 bits") from None
    if asked.sampling.kept_set:
        logprobs = meta.output_token_sampling_logprobs or []
    else:  # SGLang writes null for NaN
        logprobs = [float("nan") if row[0] is None else row[0] for row in meta.output_token_logprobs or []]
    # An engine cannot have taken longer than its caller waited, whatever its clock says.
    generated_s = min(elapsed_s, max(0.0, meta.e2e_latency - (meta.queue_time or 0.0)))
    responses = Responses(
        offsets=np.array([0, len(tokens)], np.int64),
        tokens=tokens,
        logprobs=as_float32(logprobs),
        versions=token_versions(meta, len(tokens), asked.late_tokens),
        sampled=np.broadcast_to(np.True_, len(tokens)),
        may_be_empty=np.array([meta.finish_reason.type == "abort"]),
        queued_s=as_float32([elapsed_s - generated_s]),
        generated_s=as_float32([generated_s]),
        kept=_kept(sample) if asked.sampling.kept_set else None,
    )
    limits = Limits(vocab_size=asked.sampling.vocab_size, max_response_tokens=asked.sampling.max_new_tokens)
    for fault in response_faults(responses, limits):
        raise BadAnswerError(f"sample {number}: {fault.what}")
    versions = responses.versions
    return Completion(
        tokens=tokens.astype(np.int32),
        logprobs=responses.logprobs,
        versions=(
            np.broadcast_to(np.int32(versions[0]), len(versions))  # usually all are equal, and take no memory
            if versions.strides == (0,) and len(versions)
            else versions.astype(np.int32)
        ),
        loss_mask=responses.sampled,
        finish=next(reason for reason in _REASONS if reason == meta.finish_reason.type),
        engine=engine,
        queued_s=float(responses.queued_s[0]),
        generated_s=float(responses.generated_s[0]),
        experts=_routes(sample, responses.versions, asked),
        kept=responses.kept,
        retractions=_retractions(meta, keeps_kv=asked.keeps_kv),
        cached_tokens=meta.cached_tokens or 0,
    )


def _retractions(meta: MetaInfo, *, keeps_kv: bool) -> int:
    """Return the retractions for lack of memory: all but those by which the request was paused for new weights."""
    paused = 0 if keeps_kv else len(meta.weight_versions or [None]) - 1
    return max(0, (meta.num_retractions or 0) - paused)


def _shape_fault(sample: Generated, asked: Asked) -> str | None:
    """Return the fault in a sample's counts; None when there is none. Token values are not checked."""
    meta, count = sample.meta_info, len(sample.output_ids)
    rows = meta.output_token_logprobs or []
    if meta.finish_reason.type not in _REASONS:
        return f"it ended with {quoted(meta.finish_reason.type)}, expected one of {', '.join(_REASONS)}"
    if isinstance(meta.finish_reason.matched, str):
        # SGLang says "NaN happened" here, and puts an end-of-text token in place of the one that it could not sample.
        return f"it was ended by {quoted(meta.finish_reason.matched)}, but no such text was asked for"
    if count > asked.sampling.max_new_tokens:
        return f"it has {count} tokens, at most {asked.sampling.max_new_tokens} were asked for"
    if meta.finish_reason.type == "length" and count < asked.sampling.max_new_tokens:
        # SGLang silently lowers max_new_tokens to the capacity of its keys and values.
        return (
            f"it was cut off at {count} of {asked.sampling.max_new_tokens} tokens: with a prompt of {asked.num_prompt} "
            "they do not fit the engine's keys and values (max_total_num_tokens in its log) or its context; raise "
            "--mem-fraction-static in rollout.extra_args or rollout.tensor_parallel, or lower rollout.max_new_tokens"
        )
    if meta.prompt_tokens not in (None, asked.num_prompt):
        return f"it answers a prompt of {meta.prompt_tokens} tokens, expected {asked.num_prompt}"
    if meta.completion_tokens not in (None, count):
        return f"it has {count} tokens, and says that it has {meta.completion_tokens}"
    if len(rows) != count:
        return f"it has {count} tokens, but {len(rows)} log-probabilities"
    if [row[1] for row in rows] != sample.output_ids:
        return "its log-probabilities belong to other tokens than it has"
    return None


def token_versions(meta: MetaInfo, num_tokens: int, late_tokens: int = 0) -> NDArray[np.int64]:
    """Return the policy version of each response token; see Asked about `late_tokens`. Older engines answer no spans:
    then every token counts as of the version with which the sample ended."""
    spans = meta.weight_versions
    if spans is None:
        return np.broadcast_to(np.int64(policy_version(meta.weight_version)), num_tokens)
    edges = [0, *(span.end for span in spans)]
    if [span.start for span in spans] != edges[:-1] or edges[-1] != num_tokens or edges != sorted(edges):
        raise BadAnswerError(
            f"its version spans end at {quoted(edges[1:])} and do not follow one another over {num_tokens} tokens"
        )
    if not num_tokens:
        return np.zeros(0, np.int64)
    if len(spans) == 1:
        return np.broadcast_to(np.int64(policy_version(spans[0].version)), num_tokens)
    begin = np.minimum(np.array(edges[1:-1]) + late_tokens, num_tokens)
    counts = np.diff([0, *begin, num_tokens])
    return np.repeat(np.array([policy_version(span.version) for span in spans], np.int64), counts)


def _kept(sample: Generated) -> KeptSets:
    """Return the kept sets. An aborted request without tokens comes without kept sets."""
    meta, tokens = sample.meta_info, sample.output_ids
    masks, logprobs = meta.output_token_sampling_mask, meta.output_token_sampling_logprobs
    if not tokens:
        return KeptSets.empty(0)
    if masks is None or logprobs is None:
        raise BadAnswerError(
            "engine did not say which tokens top_p and top_k left; serve with SGLang 0.5.23, or set rollout.kept_set "
            "to false"
        )
    if len(masks) != len(tokens) or len(logprobs) != len(tokens):
        raise BadAnswerError(
            f"engine answered {len(masks)} kept sets and {len(logprobs)} log-probabilities for {len(tokens)} response "
            "tokens"
        )
    if max(map(len, masks)) > MOST_KEPT_IDS:
        raise BadAnswerError(f"a kept set has {max(map(len, masks))} ids, expected at most {MOST_KEPT_IDS}")
    try:
        kept = KeptSets.of(masks)
        kept.check(np.array(tokens, np.int32), np.ones(len(tokens), np.bool_))
    except (ValueError, OverflowError) as error:
        raise BadAnswerError(f"engine answered kept sets that cannot be: {error}") from error
    return kept


def _routes(sample: Generated, versions: NDArray[np.integer], asked: Asked) -> RoutedExperts | None:
    """Return the experts of prompt and response. An aborted request comes without them: its routes are unknown."""
    meta, shape = sample.meta_info, asked.sampling.experts
    if shape is None:
        return None
    num_tokens = asked.num_prompt + len(versions)
    if meta.routed_experts is None and meta.finish_reason.type == "abort":
        return RoutedExperts.unknown(num_tokens, shape)
    if meta.routed_experts is None or meta.num_retractions is None:
        raise BadAnswerError(
            "engine did not say which experts its tokens went to; start it with --enable-return-routed-experts "
            "(SGLang 0.5.23), or set rollout.replay_experts to false"
        )
    try:
        rows = decode_engine_rows(meta.routed_experts, num_tokens, shape)
    except ValueError as error:
        raise BadAnswerError(f"engine answered {error}") from error
    if asked.keeps_kv:  # then a retraction is for lack of memory, at a place that the answer does not give
        return rows.forget(len(rows)) if meta.num_retractions else rows
    return rows_still_true(rows, asked.num_prompt, versions, meta.num_retractions)


_QUOTE, _BACKSLASH = ord('"'), ord("\\")
_CASE_BIT = np.uint8(0x20)
"""ASCII's case bit: with it set, [ is {, and ] is }."""
_OPENING, _CLOSING = ord("{"), ord("}")


class ElementCutter:
    """A cutter of a JSON list of lists or objects into elements. It checks the bytes between elements, not within."""

    def __init__(self, *, most: int, element_bytes: int) -> None:
        self.count = 0
        """Elements that have begun."""
        self._most = most
        self._element_bytes = element_bytes
        self._depth = self._quotes_before = self._backslashes_before = 0
        self._open: bytearray | None = None
        """The bytes of an element that has not ended; None between two elements."""
        self._between = b""
        """The bytes since the last element, without blanks."""

    def add(self, part: bytes) -> Iterator[bytes]:
        """Yield the elements that end in `part`, which follows the parts before it. Take all of them before adding the
        next part. Raises NoListError for bytes that are not the expected list, or that exceed it."""
        done = 0
        for edge in self._edges(part):
            opened = self._keep(part[done:edge])
            if opened is not None:
                yield bytes(opened)
                self._open = None
            else:
                if self._between != (b"," if self.count else b"["):
                    raise NoListError("it is no JSON list of objects")
                if self.count == self._most:
                    raise NoListError(f"it has more than {self._most} elements")
                self.count += 1
                self._open, self._between = bytearray(), b""
            done = edge
        self._keep(part[done:])

    def end(self) -> None:
        """End the list after the last part. Raises NoListError when it is incomplete."""
        if self._open is not None or self._between != (b"]" if self.count else b"[]"):
            raise NoListError("it is no JSON list of objects, or not a whole one")

    def _keep(self, piece: bytes) -> bytearray | None:
        """Add bytes to the open element and return it; return None between two elements, where few bytes are valid."""
        if self._open is None:
            self._between += b"".join(piece.split())
            if len(self._between) > 2:
                raise NoListError("it is no JSON list of objects")
            return None
        if len(self._open) + len(piece) > self._element_bytes:
            raise NoListError(f"its element {self.count - 1} has more than {self._element_bytes} bytes")
        self._open += piece
        return self._open

    def _edges(self, part: bytes) -> list[int]:
        """Return where elements begin and end, by turns: the places of brackets that lead into depth 2, and the places
        behind brackets that lead out of it."""
        block = np.frombuffer(part, np.uint8)
        quotes = np.flatnonzero(block == _QUOTE)
        plain, backslashes = block != _BACKSLASH, self._backslashes_before
        self._backslashes_before = 0
        if backslashes or not plain.all():
            others = np.flatnonzero(plain)
            # For each quote, the last byte before it that is no backslash; backslashes at the end of the previous block
            # count as bytes before byte 0. A quote after an odd number of backslashes is part of its text.
            last = np.concatenate([[-1 - backslashes], others])[np.searchsorted(others, quotes)]
            self._backslashes_before = len(block) - 1 - int(others[-1]) if len(others) else len(block) + backslashes
            quotes = quotes[(quotes - 1 - last) % 2 == 0]
        folded = block | _CASE_BIT
        places = np.flatnonzero((folded == _OPENING) | (folded == _CLOSING))
        if len(quotes) or self._quotes_before % 2:
            places = places[(np.searchsorted(quotes, places) + self._quotes_before) % 2 == 0]
        opens = folded[places] == _OPENING
        depths = self._depth + np.cumsum(np.where(opens, 1, -1))
        self._quotes_before += len(quotes)
        self._depth = int(depths[-1]) if len(depths) else self._depth
        is_edge = np.where(opens, depths == 2, depths == 1)
        return list(map(int, (places + ~opens)[is_edge]))


PIECE_BYTES = 1 << 16
"""Bytes that are parsed at once. An answer of fewer is parsed on the event loop, which takes about a millisecond."""


async def read_answer(parts: AsyncIterator[bytes], reader: SampleReader[T]) -> list[T]:
    """Return `reader`'s results for the samples of an answer that arrives in `parts`. Raises as the reader does."""
    held, is_small = bytearray(), True
    async for part in parts:
        held += part
        if len(held) > PIECE_BYTES:
            is_small = False
            await beside_loop(reader.add, bytes(held))
            held.clear()
    if is_small:
        reader.add(bytes(held))
    else:
        await beside_loop(reader.add, bytes(held))
    return reader.end()


_WHOLE = 1e-3
"""Largest distance from 1 of the sum of a whole distribution's probabilities."""


def input_logprobs(row: Sequence[int], sample: Generated) -> NDArray[np.float32]:
    """Return the [n - 1] log-probabilities of tokens 1…n-1. Raises BadAnswerError. The tokens were not sampled, so a
    log-probability may be as low as float32 allows."""
    scored = sample.meta_info.input_token_logprobs or []
    # SGLang names the vocabulary's last id 0 here (it clips the ids of image tokens), yet scores the real token.
    foreign = sum(named not in (token, 0) for token, (_, named, _) in zip(row, scored, strict=False))
    values = [value for value, _, _ in scored[1:] if value is not None]
    if foreign or len(scored) != len(row) or len(values) != len(row) - 1:
        raise BadAnswerError(f"it scored {len(values)} of {len(row) - 1} tokens, {foreign} of them others than asked")
    found = as_float32(values)
    if not np.all(np.isfinite(found) & (found <= HIGHEST_LOGPROB)):
        raise BadAnswerError(
            f"it scored a token by {found[~(np.isfinite(found) & (found <= HIGHEST_LOGPROB))][0]:g}, expected a "
            "log-probability"
        )
    return found


def tempered_totals(
    row: Sequence[int], sample: Generated, temperature: float, kept: Sequence[NDArray[np.int32]]
) -> NDArray[np.float64]:
    """Return [n - 1] for tokens 1…n-1: log sum p^(1/T) over each token's distribution, or over its `kept` ids."""
    distributions = (sample.meta_info.input_top_logprobs or [])[1:]
    if len(distributions) != len(row) - 1 or not all(distributions):
        raise BadAnswerError(f"it gave {len(distributions)} of {len(row) - 1} distributions")
    totals = []
    for place, distribution in enumerate(distributions):
        answered = [(value, token) for value, token, _ in distribution or () if value is not None]
        logprobs = np.array([value for value, _ in answered], np.float64)
        with np.errstate(over="ignore"):
            whole = float(np.exp(logprobs).sum())
        if not abs(whole - 1.0) <= _WHOLE:
            raise BadAnswerError(
                f"it gave distributions of {whole:.4g} in all, expected 1; start it with a larger limit for "
                "top_logprobs_num"
            )
        if kept and len(kept[place]):
            logprobs = logprobs[np.isin([token for _, token in answered], kept[place])]
        totals.append(np.logaddexp.reduce(logprobs / temperature))
    return np.array(totals)
